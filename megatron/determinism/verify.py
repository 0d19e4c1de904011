"""Run a training command several times in fresh processes and compare what the runs did, bit by bit."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.determinism.compare import compare
from megatron.determinism.report import Exit, Outcome

_FLAG = "--fingerprint-dir"
_TAIL_LINES = 15


def default_folder(now: datetime.datetime) -> Path:
    """Where the legs go when no folder is named."""
    return Path("runs") / f"verify_{now:%Y%m%d_%H%M%S}"


def verify(launch: Sequence[str], folder: Path, *, runs: int) -> Outcome:
    """Run ``launch`` ``runs`` times, each into a fingerprint folder of its own under ``folder``, and compare the first
    leg with each other one. Output of the legs goes to ``leg_N.log``."""
    if any(word == _FLAG or word.startswith(_FLAG + "=") for word in launch):
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"leave {_FLAG} out of the command: each leg gets its own")
    legs = [folder / f"leg_{n}" for n in range(1, runs + 1)]
    taken = [str(leg) for leg in legs if leg.exists()]
    if taken:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"{', '.join(taken)} exists already; name another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    for number, leg in enumerate(legs, 1):
        print(f"leg {number} of {runs}: {shlex.join(launch)}", file=sys.stderr, flush=True)
        failure = _run_leg([*launch, _FLAG, str(leg)], leg.with_suffix(".log"))
        if failure is not None:
            return failure
    return _compare_legs(legs)


def _run_leg(command: Sequence[str], log: Path) -> Outcome | None:
    """Run one leg to its end; ``None`` where it succeeded."""
    try:
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    except OSError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"could not start {shlex.join(command)}: {error}")
    if code == 0:
        return None
    tail = log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return Outcome(
        exit=Exit.DAMAGED,
        verdict=f"a leg failed with exit code {code}: {shlex.join(command)}",
        details=(f"  its last lines (all of them in {log}):", *(f"  {line}" for line in tail)),
        facts={"command": list(command), "leg_exit_code": code, "log": str(log)},
    )


def _compare_legs(legs: Sequence[Path]) -> Outcome:
    outcomes = [compare(legs[0], leg) for leg in legs[1:]]
    worst = max(outcomes, key=lambda outcome: outcome.exit)
    if worst.exit != Exit.SAME:
        other = legs[1 + outcomes.index(worst)]
        return replace(worst, details=(f"  A = {legs[0]}, B = {other}", *worst.details))
    return replace(worst, verdict=f"{len(legs)} legs {worst.verdict}", facts={**worst.facts, "legs": len(legs)})
