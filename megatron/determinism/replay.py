"""replay: iterations of an earlier run again, from a checkpoint and traced, on as few ranks as hold the state."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.config.errors import DamagedInputError
from megatron.determinism.compare import compare
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.verify import names_flag, run_leg
from megatron.training.config.manifest import MANIFEST_FILE
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, read_lines

OWN_FLAGS = (
    "--fingerprint-dir",
    "--trace-dir",
    "--trace-level",
    "--trace-iterations",
    "--ckpt-step",
    "--exit-interval",
    "--save",
)
_SHOWN = 8
_CHECKPOINT = re.compile(r"iter_(\d{7,})")


def replay(launch: Sequence[str], folder: Path, original: Path, window: tuple[int, int], level: str) -> Outcome:
    """Run ``launch`` from the last checkpoint of its ``--load`` before iteration ``window[0]`` to iteration
    ``window[1]``, traced inside the window, and compare it with the fingerprint folder of the ``original`` run.

    The trace is that of the original run only where every fingerprint agrees: exit 0. Another layout of the same
    logical layout may be named. Exit 1: not faithful. Exit 2: other fixed inputs, or a fingerprint that is not there;
    one of the original's is missed before anything runs.
    """
    first, last = window
    problem = _problem(launch, folder)
    start = 0
    if problem is None and first > 1:
        start, problem = _checkpoint_before(launch, first)
    if problem is not None:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=problem)
    unknown = _without_fingerprint("the original run", original, window)
    if unknown is not None:
        return unknown
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / "fingerprint"
    own = ["--fingerprint-dir", str(mine), "--fingerprint-interval", "1"]
    own += ["--fingerprint-level", "state", "--trace-dir", str(folder / "trace"), "--trace-level", level]
    own += ["--trace-iterations", f"{first}:{last}", "--exit-interval", str(last)]
    own += ["--ckpt-step", str(start), "--exit-on-missing-checkpoint"] if start else []
    origin = f"the checkpoint of iteration {start}" if start else "the seed"
    print(f"replaying iterations {start + 1} to {last} from {origin}", file=sys.stderr, flush=True)
    failure = run_leg([*launch, *own], folder / "output.log", leaves=mine / MANIFEST_FILE)
    if failure is not None:
        return failure
    return _judged(original, folder, window)


def _problem(launch: Sequence[str], folder: Path) -> str | None:
    taken = [flag for flag in OWN_FLAGS if names_flag(launch, flag)]
    if taken:
        return f"leave {', '.join(taken)} out: the replay gets its own, and saves nothing"
    if folder.exists() and any(folder.iterdir()):
        return f"{folder} is not empty; name another --dir"
    return None


def _checkpoint_before(launch: Sequence[str], first: int) -> tuple[int, str | None]:
    """The iteration of the last checkpoint before ``first``, or what is missing."""
    given = [n for n, word in enumerate(launch) if word == "--load" or word.startswith("--load=")]
    if not given:
        return 0, f"iteration {first} needs a checkpoint to start from: add --load FOLDER to the command"
    word = launch[given[-1]]
    root = Path(word.partition("=")[2] or " ".join(launch[given[-1] + 1 : given[-1] + 2]))
    found = [int(name[1]) for path in root.glob("iter_*") if (name := _CHECKPOINT.fullmatch(path.name))]
    before = [iteration for iteration in found if iteration < first]
    if not before:
        have = ", ".join(str(n) for n in sorted(found)) or "none"
        return 0, f"{root} has no checkpoint before iteration {first} (it has: {have})"
    return max(before), None


def _judged(original: Path, folder: Path, window: tuple[int, int]) -> Outcome:
    """Whether the replay is the original, by its fingerprints."""
    mine = folder / "fingerprint"
    outcome = compare(original, mine)
    if outcome.exit == Exit.NOT_COMPARABLE and "differing_inputs" in outcome.facts:
        forced = compare(original, mine, force=True)
        if forced.exit == Exit.DIFFERENT:
            outcome = forced
    facts = {**outcome.facts, "replay": str(folder), "window": list(window), "trace": str(folder / "trace")}
    if outcome.exit == Exit.DIFFERENT:
        return replace(outcome, verdict=f"not faithful, so its trace says nothing: {outcome.verdict}", facts=facts)
    if outcome.exit != Exit.SAME:
        return replace(outcome, facts=facts)
    unknown = _without_fingerprint("the replay", mine, window)
    if unknown is not None:
        return replace(unknown, facts=facts)
    return replace(outcome, verdict=f"faithful: {outcome.verdict}; trace in {folder / 'trace'}", facts=facts)


def _without_fingerprint(run: str, folder: Path, window: tuple[int, int]) -> Outcome | None:
    """That ``run`` has no fingerprint of iterations of the window, so that nothing can be said of them; or ``None``."""
    try:
        known = read_lines(folder / FINGERPRINT_FILE)
    except DamagedInputError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"damaged or missing: {error}")
    first, last = window
    count = last - first + 1 - sum(first <= iteration <= last for iteration in known)
    if not count:
        return None
    # The first few only: a window may be as wide as a number is long.
    unknown = itertools.islice((str(n) for n in range(first, last + 1) if n not in known), _SHOWN)
    said = ", ".join(unknown) + f" and {count - _SHOWN} more" * (count > _SHOWN)
    span = f"it has {min(known)} to {max(known)}" if known else "it has none"
    verdict = f"{run} has no fingerprint of iteration {said} ({span}), so nothing can be said of it"
    return Outcome(exit=Exit.NOT_COMPARABLE, verdict=verdict)
