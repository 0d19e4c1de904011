"""validate: does a patched command end the difference that a bisection found, and what does the patch cost?"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.determinism.compare import compare
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.tax_legs import Leg, LegFailedError, Legs

COMMANDS_FILE = "bisect.json"
_FINGERPRINT = "fingerprint"

Commands = tuple[Sequence[str], Sequence[str]]


def write_commands(folder: Path, commands: Commands) -> None:
    """Keep what a bisection ran, for ``validate``."""
    text = json.dumps({"a": list(commands[0]), "b": list(commands[1])}, indent=1)
    (folder / COMMANDS_FILE).write_text(text + "\n", encoding="utf-8")


def validate(folder: Path, patched: Sequence[str], against: Sequence[str] | None = None) -> Outcome:
    """Run the pair of a bisect folder again, then ``patched`` in the place of its command A and ``against`` (default:
    ``patched`` again) in that of B.

    Exit 0: the original pair differs and the patched one does not. Exit 1: the patched pair differs. Exit 2: the
    original pair does not differ any more, which proves nothing. Exit 3: a leg failed.
    """
    try:
        raw = json.loads((folder / COMMANDS_FILE).read_text("utf-8"))
        original = list(raw["a"]), list(raw["b"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"{folder} is not the folder of a bisection: {error}")
    new = next(path for n in itertools.count(1) if not (path := folder / f"validate_{n}").exists())
    new.mkdir()
    try:
        before, legs = _pair(new, "original", original)
        if before.exit != Exit.DIFFERENT:
            return _nothing_proven(before, new)
        after, patched_legs = _pair(new, "patched", (patched, patched if against is None else against))
    except LegFailedError as error:
        return error.outcome
    return _judged(before, after, legs + patched_legs, new)


def _pair(folder: Path, name: str, commands: Commands) -> tuple[Outcome, list[Leg]]:
    """Both legs of a pair, A then B, and what their fingerprints say."""
    legs = []
    for side, command in zip("ab", commands, strict=True):
        leg = folder / f"{name}_{side}"
        own = ["--fingerprint-dir", str(leg / _FINGERPRINT), "--fingerprint-interval", "1"]
        legs.append(Legs(launch=command, folder=folder, warm_up=None).run(leg.name, own))
    first, second = (leg.folder / _FINGERPRINT for leg in legs)
    return compare(first, second, force=list(commands[0]) != list(commands[1])), legs


def _nothing_proven(before: Outcome, folder: Path) -> Outcome:
    if before.exit != Exit.SAME:
        return before
    return Outcome(
        exit=Exit.NOT_COMPARABLE,
        verdict=f"nothing is proven: the original pair does not differ any more ({before.verdict})",
        next_action="run it again; a difference that comes and goes needs several tries",
        facts={"legs": str(folder)},
    )


def _judged(before: Outcome, after: Outcome, legs: Sequence[Leg], folder: Path) -> Outcome:
    old, new = (statistics.median(leg.step_s for leg in pair) for pair in (legs[:2], legs[2:]))
    numbers = compare(legs[0].folder / _FINGERPRINT, legs[2].folder / _FINGERPRINT, force=True)
    facts: dict[str, Any] = {
        "legs": str(folder),
        "original": dict(before.facts),
        "patched": dict(after.facts),
        "step_s_before": old,
        "step_s_after": new,
        "cost": new / old - 1.0,
    }
    details = (
        f"  original pair: {before.verdict}",
        f"  patched pair: {after.verdict}",
        f"  original A and patched A: {numbers.verdict}",
        f"  median step: {old * 1000:.1f} ms before, {new * 1000:.1f} ms after ({new / old - 1.0:+.1%})",
    )
    if after.exit == Exit.SAME:
        return Outcome(exit=Exit.SAME, verdict="fixed: the patched pair is identical", details=details, facts=facts)
    verdict = "not fixed: the patched pair differs" if after.exit == Exit.DIFFERENT else after.verdict
    return replace(after, verdict=verdict, details=(*details, *after.details), facts=facts)
