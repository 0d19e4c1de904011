"""The folder of a run: ``metrics.jsonl``, ``manifest.json`` and ``curves.png``, over any number of launches.

A launch goes on with the records up to the iteration it starts from, if they are of the run it goes on with: at that
iteration the fixed inputs of both, before any branch there or later, were the same. All other records move to
``earlier_N/``. When records move or fixed inputs have changed, the manifest, the picture and the profiles move too.
Torch is not needed here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.config.manifest import (
    EARLIER,
    MANIFEST_FILE,
    Json,
    differences,
    flag_of,
    sources_part,
    telling,
    with_sources,
)
from megatron.training.observe.run_manifest import write_json, write_whole

METRICS_FILE, PICTURE_FILE, PROFILES = "metrics.jsonl", "curves.png", "profile_rank_*"
_BESIDE = {MANIFEST_FILE: "manifest", PICTURE_FILE: "picture", PROFILES: "profiles"}
_NAMED = 3


def prepare_run_folder(folder: Path, manifest: Json, *, start_iteration: int) -> str | None:
    """Make the folder ready for a launch that starts behind ``start_iteration``, and write its manifest; on one rank.
    Returns what was moved away and where to, in words; ``None`` where nothing was."""
    folder.mkdir(parents=True, exist_ok=True)
    there = _stored(folder / MANIFEST_FILE)
    kept, left = _records(folder / METRICS_FILE, start_iteration if _goes_on(there, manifest, start_iteration) else -1)
    changed = _changed_inputs(folder / MANIFEST_FILE, there, manifest)
    words = None
    if left or changed:
        earlier = next(at for n in itertools.count(1) if not (at := folder / f"{EARLIER}{n}").exists())
        earlier.mkdir()
        if left:
            write_whole(earlier / METRICS_FILE, "".join(left))
        moved = [_records_in_words(len(left), start_iteration if kept else None)] * bool(left)
        for name, what in _BESIDE.items():
            paths = sorted(folder.glob(name))
            for path in paths:
                path.rename(earlier / path.name)
            moved += [what] * bool(paths)
        words = f"{folder} was that of {_whose(changed)}: {_listed(moved)} moved to {earlier}"
    write_whole(folder / METRICS_FILE, "".join(kept))
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


def _stored(manifest: Path) -> Json | None:
    """The manifest that is there, where it can be read."""
    stored = _as_json(manifest.read_text("utf-8", errors="replace")) if manifest.exists() else {}
    return stored if isinstance(stored.get("trajectory"), dict) else None


def _goes_on(there: Json | None, manifest: Json, start_iteration: int) -> bool:
    """Whether the records there up to the iteration are of the run that goes on from it. What a launch that trains
    nothing has evaluated at that iteration came after its branch there."""
    if there is None:
        return False
    trajectory = manifest["trajectory"]
    if not differences(there["trajectory"], trajectory):
        return True
    launch = there.get("launch", {})
    only_evaluated = launch.get("operational", {}).get("training", {}).get("skip_train", False)
    undo_there = start_iteration + 1 if only_evaluated else start_iteration
    before = _before_branches(there["trajectory"], undo_there)
    return not differences(before, _before_branches(trajectory, start_iteration))


def _before_branches(trajectory: Json, iteration: int) -> Json:
    """A trajectory, flat, without what its branches from ``iteration`` on have changed; it begins at --finetune."""
    values = _flat({name: value for name, value in trajectory.items() if name != "branches"})
    branches = list(trajectory.get("branches", ()))
    while branches and branches[-1]["iteration"] >= iteration and "--finetune" not in branches[-1]["why"]:
        for path, (then, _) in branches.pop().get("changed", {}).items():
            others = {name: v for name, v in values.items() if name != path and not name.startswith(f"{path}.")}
            values = {**others, **_flat(then, path)}
    return {**values, "branches": branches}


def _flat(value: Any, path: str = "") -> Json:
    if not isinstance(value, dict):
        return {path: value}
    parts = (_flat(part, f"{path}.{name}" if path else name) for name, part in value.items())
    return {name: leaf for part in parts for name, leaf in part.items()}


def _changed_inputs(path: Path, there: Json | None, manifest: Json) -> list[str]:
    """Fixed inputs of the run that is there that are not those of this one, by flag."""
    if there is None:
        return ["its manifest cannot be read"] if path.exists() else []
    then, now = (sources_part(each.get("launch", {}).get("operational", {})) for each in (there, manifest))
    found = telling(with_sources(differences(there["trajectory"], manifest["trajectory"]), then, now))
    return list(dict.fromkeys(flag_of(path) for path, _, _ in found))


def _whose(changed: Sequence[str]) -> str:
    if not changed:
        return "an earlier launch"
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    return f"a run with other fixed inputs ({', '.join(changed[:_NAMED])}{more})"


def _records_in_words(count: int, after: int | None) -> str:
    which = "" if after is None else f" after iteration {after}"
    return f"{count} record{'s' * (count != 1)}{which}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])
