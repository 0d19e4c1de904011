"""The folder of a run: ``metrics.jsonl``, ``manifest.json`` and ``curves.png``, over any number of launches.

A launch goes on with the records up to the iteration it starts from. What it would write over moves to ``earlier_N/``:
records after that iteration, and of a run with other fixed inputs the manifest and the picture too. Torch is not needed
here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.folder import naming
from megatron.training.config.manifest import EARLIER, MANIFEST_FILE, Json, differences, flag_of
from megatron.training.observe.run_manifest import write_json

METRICS_FILE, PICTURE_FILE, PROFILES = "metrics.jsonl", "curves.png", "profile_rank_*"
_NAMED = 3


def prepare_run_folder(folder: Path, manifest: Json, *, start_iteration: int) -> str | None:
    """Make the folder ready for a launch that starts behind ``start_iteration``, and write its manifest; on one rank.
    Returns what was moved away and where to, in words; ``None`` where nothing was."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, left = _records(folder / METRICS_FILE, start_iteration)
    changed = _changed_inputs(folder / MANIFEST_FILE, manifest["trajectory"])
    words = None
    if left or changed:
        earlier = next(at for n in itertools.count(1) if not (at := folder / f"{EARLIER}{n}").exists())
        earlier.mkdir()
        if left:
            _write(earlier / METRICS_FILE, left)
        for path in sorted(p for name in (MANIFEST_FILE, PICTURE_FILE, PROFILES) for p in folder.glob(name)):
            path.rename(earlier / path.name)
        words = _words(folder, earlier, len(left), changed, start_iteration)
    _write(folder / METRICS_FILE, kept)
    write_json(folder / MANIFEST_FILE, manifest)
    return words


def _records(metrics: Path, start_iteration: int) -> tuple[list[str], list[str]]:
    """Lines up to the iteration, and the whole ones after it; one that says of no iteration is not gone on with."""
    kept: list[str] = []
    left: list[str] = []
    for line in metrics.read_text("utf-8", errors="replace").splitlines(keepends=True) if metrics.exists() else ():
        if line.endswith("\n"):
            iteration = _as_json(line).get("iteration")
            (kept if isinstance(iteration, int) and iteration <= start_iteration else left).append(line)
    return kept, left


def _as_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _changed_inputs(manifest: Path, trajectory: Json) -> list[str]:
    """Fixed inputs of the run that is there that are not those of this one, by flag."""
    if not manifest.exists():
        return []
    stored = _as_json(manifest.read_text("utf-8", errors="replace")).get("trajectory")
    if not isinstance(stored, dict):
        return ["its manifest cannot be read"]
    return list(dict.fromkeys(flag_of(path) for path, _, _ in differences(stored, trajectory)))


def _words(folder: Path, earlier: Path, records: int, changed: Sequence[str], start_iteration: int) -> str:
    of, moved = "an earlier launch", []
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        of = f"a run with other fixed inputs ({', '.join(changed[:_NAMED])}{more})"
    if records:
        moved.append(f"{records} record{'s' * (records != 1)} after iteration {start_iteration}")
    return f"{folder} was that of {of}: {', '.join([*moved, 'manifest and picture'])} moved to {earlier}"


def _write(path: Path, lines: Sequence[str]) -> None:
    unfinished = path.with_suffix(".part")
    with naming(path):
        unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(path)
