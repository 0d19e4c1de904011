"""Run a training command several times in fresh processes and compare what the runs did, bit by bit."""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.config.numbers import whole_number
from megatron.core.dist_checkpointing.folder import complete_iterations
from megatron.determinism.compare import compare
from megatron.determinism.leg_log import read_failure
from megatron.determinism.report import Exit, Outcome
from megatron.training.config.folder_rules import unusable
from megatron.training.config.manifest import MANIFEST_FILE
from megatron.training.setup.environment import read_environment

_FLAG = "--fingerprint-dir"
_SAVING = ("--save", "--load", "--save-interval", "--persistent-save-interval", "--exit-interval", "--ckpt-step")
_NEVER = "1000000000"
_LOOK_S, _GRACE_S = 0.5, 60.0


def default_folder(now: datetime.datetime) -> Path:
    """Where the legs go when no folder is named."""
    return Path("runs") / f"verify_{now:%Y%m%d_%H%M%S}"


def output_folder(text: str) -> Path:
    """A folder that can be written, or a new one, from the command line.

    Raises:
        argparse.ArgumentTypeError: it is no such thing.
    """
    reason = unusable(text, write=True)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{text or repr(text)}, {reason}: a folder that can be written, or a new one")
    return Path(text)


def verify(launch: Sequence[str], folder: Path, *, runs: int, resume_at: Sequence[int] = ()) -> Outcome:
    """Run ``launch`` ``runs`` times, each into a fingerprint folder of its own under ``folder``, and compare the first
    leg with each other one. Output of the legs goes to ``leg_N.log``.

    With ``resume_at`` one more leg, ``leg_resumed``, is stopped after each of these iterations (ascending) and gone on
    with from its checkpoint in a fresh process.
    """
    refusal = _refused(launch, resume_at)
    if refusal is not None:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=refusal)
    legs = [folder / f"leg_{n}" for n in range(1, runs + 1)] + [folder / "leg_resumed"] * bool(resume_at)
    taken = [str(leg) for leg in legs if leg.exists()]
    if taken:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"{', '.join(taken)} exists already; name another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    for number, leg in enumerate(legs[:runs], 1):
        print(f"leg {number} of {len(legs)}: {shlex.join(launch)}", file=sys.stderr, flush=True)
        failure = run_leg([*launch, _FLAG, str(leg)], leg.with_suffix(".log"), leaves=leg / MANIFEST_FILE)
        if failure is not None:
            return failure
    if resume_at:
        failure = _run_resumed(launch, legs[-1], folder / "checkpoints", resume_at)
        if failure is not None:
            return failure
    return _compare_legs(legs)


def _refused(launch: Sequence[str], resume_at: Sequence[int]) -> str | None:
    """Why the command's words cannot be verified so; ``None`` where they can."""
    given = [flag for flag in (_FLAG, *(_SAVING if resume_at else ())) if names_flag(launch, flag)]
    if given:
        return f"leave {', '.join(given)} out of the command: each leg gets its own"
    length = whole_number(flag_value(launch, "--train-iters") or "")
    if resume_at and length is not None and resume_at[-1] >= length:
        return (
            f"--resume-at {','.join(map(str, resume_at))} with --train-iters {length} in the command: a run that has "
            f"ended cannot be gone on with; name iterations below {length}, or train for longer"
        )
    return None


def names_flag(launch: Sequence[str], flag: str) -> bool:
    """Whether a command line gives a flag."""
    return flag_value(launch, flag) is not None


def flag_value(launch: Sequence[str], flag: str) -> str | None:
    """The value a command line gives a flag, the last one as a parser takes it; ``None`` where it does not give it, an
    empty one for a switch at its end."""
    value = None
    for word, following in itertools.zip_longest(launch, launch[1:], fillvalue=""):
        if word == flag:
            value = following
        elif word.startswith(flag + "="):
            value = word.removeprefix(flag + "=")
    return value


def _run_resumed(launch: Sequence[str], leg: Path, checkpoints: Path, stops: Sequence[int]) -> Outcome | None:
    """Run the leg that is stopped and resumed; ``None`` where every part of it succeeded."""
    saving = ["--save", str(checkpoints), "--save-interval", _NEVER]
    for part, stop in enumerate([*stops, None]):
        words = [*launch, _FLAG, str(leg), *saving]
        words += ["--load", str(checkpoints), "--exit-on-missing-checkpoint"] if part else []
        words += ["--exit-interval", str(stop)] if stop is not None else []
        until = "its end" if stop is None else f"iteration {stop}"
        print(f"resumed leg, until {until}: {shlex.join(launch)}", file=sys.stderr, flush=True)
        failure = run_leg(words, leg.with_name(f"{leg.name}_{part + 1}.log"))
        if failure is not None:
            return failure
        saved = max(complete_iterations(checkpoints), default=0)
        if (saved <= stops[-1]) if stop is None else (saved != stop):
            return _not_resumed(stops[min(part, len(stops) - 1)], saved, stops)
    return None


def _not_resumed(stop: int, saved: int, stops: Sequence[int]) -> Outcome:
    end = f"the leg's newest checkpoint is that of iteration {saved}" if saved else "the leg left no checkpoint"
    return Outcome(
        exit=Exit.NOT_COMPARABLE,
        verdict=f"--resume-at {','.join(map(str, stops))}: nothing was resumed at iteration {stop} ({end}), so nothing "
        "is proved; name iterations before the end of the run, or train for longer",
        facts={"not_resumed_at": stop, "newest_checkpoint": saved or None},
    )


def run_leg(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    until: Callable[[], bool] | None = None,
    leaves: Path | None = None,
) -> Outcome | None:
    """Run one leg to its end; ``None`` where it succeeded. ``environment`` has variables that it gets besides ours.
    Once ``until`` says so, nothing more is wanted of it: it is stopped, and has succeeded. ``leaves`` is a file that
    every run leaves: a command that ends well without it was none."""
    whole = {**read_environment(), **(environment or {})}
    try:
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=whole) as leg:
            try:
                code = _ended(leg, until)
            finally:
                # Whatever ends this process ends the leg.
                _stop(leg)
    except OSError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"could not start {shlex.join(command)}: {error}")
    if code == 0:
        return None if leaves is None or leaves.exists() else _no_run(command, leaves, log)
    failure = read_failure(log, code)
    said = "it says" if failure.explained else "its last lines" if failure.words else "it printed nothing"
    return Outcome(
        exit=Exit.DAMAGED,
        verdict=f"a leg failed with exit code {failure.code}: {shlex.join(command)}",
        details=(
            f"  {said} (whole output in {log}){':' * bool(failure.words)}",
            *(f"  {line}" for line in failure.words),
        ),
        facts={"command": list(command), "leg_exit_code": failure.code, "log": str(log)},
    )


def _no_run(command: Sequence[str], leaves: Path, log: Path) -> Outcome:
    return Outcome(
        exit=Exit.DAMAGED,
        verdict=f"a leg ended with exit code 0, but trained nothing: {shlex.join(command)}",
        details=(
            f"  it left no {leaves}; the command after -- has to start pretrain_hybrid.py (without --dry-run or "
            "--help), or a program that takes its flags",
            f"  whole output in {log}",
        ),
        facts={"command": list(command), "leg_exit_code": 0, "log": str(log)},
    )


def _ended(leg: subprocess.Popen[bytes], until: Callable[[], bool] | None) -> int:
    """The exit code of a leg, 0 where it is to be stopped."""
    while until is not None:
        try:
            return leg.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            if until():
                break
    else:
        return leg.wait()
    return 0


def _stop(leg: subprocess.Popen[bytes]) -> None:
    """End a leg: ask it, then do it; nothing where it has ended."""
    leg.terminate()
    try:
        leg.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        leg.kill()


def _compare_legs(legs: Sequence[Path]) -> Outcome:
    outcomes = [compare(legs[0], leg) for leg in legs[1:]]
    worst = max(outcomes, key=lambda outcome: outcome.exit)
    if worst.exit != Exit.SAME:
        return worst
    resumed = " (the last one resumed)" if legs[-1].name == "leg_resumed" else ""
    verdict = f"{len(legs)} legs{resumed} {worst.verdict}"
    return replace(worst, verdict=verdict, facts={**worst.facts, "legs": len(legs)})
