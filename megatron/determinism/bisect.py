"""bisect: run a command in pairs of fresh processes, traced closer each time, until the operation that differs is
found."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.determinism.compare import compare, setting_lines
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.reproduce import choice_lines, choices, write_reproducer
from megatron.determinism.trace_compare import compare_folders, describe_place
from megatron.determinism.trace_mechanism import TO_REPEAT
from megatron.determinism.trace_verdict import Verdict
from megatron.determinism.validate import write_commands
from megatron.determinism.verify import names_flag, run_leg
from megatron.training.config.manifest import MANIFEST_FILE
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, RANK_FILES, differing_fields, read_lines

OWN_FLAGS = ("--fingerprint-dir", "--trace-dir", "--trace-level", "--trace-iterations", "--trace-ranks", "--trace-dump")


class _LegFailedError(Exception):
    """A leg did not run to its end; holds the outcome to report."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.verdict)
        self.outcome = outcome


@dataclass(slots=True)
class _Search:
    """The two commands, their folder, and what was run so far."""

    commands: tuple[Sequence[str], Sequence[str]]
    folder: Path
    force: bool
    levels: list[dict[str, Any]] = field(default_factory=list)

    def pair(self, name: str, *flags: str) -> tuple[Path, Path]:
        """Run both legs, A then B; returns their folders. Where nothing is traced, B is stopped once its fingerprint
        is another.

        Raises:
            _LegFailedError: one of them failed.
        """
        legs = self.folder / f"{name}_a", self.folder / f"{name}_b"
        for command, leg in zip(self.commands, legs, strict=True):
            own = ["--fingerprint-dir", str(leg / "fingerprint"), "--fingerprint-interval", "1"]
            own += ["--fingerprint-level", "state"]
            if flags:
                own += ["--trace-dir", str(leg / "trace"), *flags]
            if names_flag(command, "--save"):
                own += ["--save", str(leg / "checkpoints")]
            _run_leg([*command, *own], leg, None if flags or leg is legs[0] else functools.partial(_parted, *legs))
        self.levels.append({"level": name, "legs": [str(leg) for leg in legs], "flags": list(flags)})
        return legs

    def fingerprints(self, legs: tuple[Path, Path]) -> Outcome:
        """What the fingerprints of a pair say; where the layout-free ones agree, those of each rank's own state."""
        folders = legs[0] / "fingerprint", legs[1] / "fingerprint"
        outcome = compare(*folders, force=self.force)
        own = _of_ranks(*folders) if outcome.exit == Exit.SAME else None
        return outcome if own is None else replace(own, facts={**outcome.facts, **own.facts})

    def traces(self, legs: tuple[Path, Path]) -> tuple[Outcome, Verdict | None]:
        """What the traces of a pair say."""
        outcome, verdict = compare_folders(legs[0] / "trace", legs[1] / "trace", force=self.force)
        self.levels[-1]["found"] = outcome.verdict
        return outcome, verdict


def bisect(launch: Sequence[str], folder: Path, *, against: Sequence[str] | None = None) -> Outcome:
    """Find the first operation in which two runs of ``launch`` (or ``launch`` and ``against``) differ.

    Pairs of legs run into ``folder``: with fingerprints alone, B until it differs; then traced by module up to the
    first iteration that differs; then traced by kernel in that iteration with the arguments of the layer in question
    kept. The last pair gives the reproducer.
    """
    commands = launch, launch if against is None else against
    taken = [flag for flag in OWN_FLAGS if any(names_flag(command, flag) for command in commands)]
    if taken:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"leave {', '.join(taken)} out: each leg gets its own")
    if folder.exists() and any(folder.iterdir()):
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"{folder} is not empty; name another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    write_commands(folder, commands)
    search = _Search(commands, folder, against is not None)
    try:
        metrics = search.fingerprints(search.pair("metrics"))
        if metrics.exit == Exit.SAME:
            return replace(
                metrics, verdict=f"runs agree: {metrics.verdict}", facts={**metrics.facts, "legs": str(folder)}
            )
        if metrics.exit != Exit.DIFFERENT:
            return metrics
        return _narrow(search, metrics)
    except _LegFailedError as error:
        return error.outcome


def _of_ranks(left: Path, right: Path) -> Outcome | None:
    """The first difference in the files of the ranks, such as a copy that drifts on one of them; ``None`` where there
    is none, or the runs have different ranks."""
    names = [sorted(path.name for path in folder.glob(RANK_FILES)) for folder in (left, right)]
    if names[0] != names[1]:
        return None
    found: list[tuple[int, str, dict[str, Any]]] = []
    try:
        for name in names[0]:
            mine, theirs = read_lines(left / name), read_lines(right / name)
            for iteration in sorted(mine.keys() & theirs.keys()):
                fields = differing_fields(mine[iteration], theirs[iteration])
                if fields:
                    found.append((iteration, name.removesuffix(".jsonl"), fields))
                    break
    except DamagedInputError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"damaged or missing: {error}")
    if not found:
        return None
    iteration, rank, fields = min(found, key=lambda first: first[:2])
    named = {f"{field} of {rank}": {"a": a, "b": b} for field, (a, b) in fields.items()}
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"different: first at iteration {iteration}, in {', '.join(named)}",
        facts={"first_difference": {"iteration": iteration, "fields": named}},
    )


def _narrow(search: _Search, metrics: Outcome) -> Outcome:
    """From the first differing iteration to the operation."""
    iteration = metrics.facts["first_difference"]["iteration"]
    outcome, verdict = _by_module(search, iteration)
    if verdict is None:
        return _not_repeated(search, metrics, outcome)
    first = verdict.first.mismatch.at["iteration"]
    window = ("--trace-iterations", str(first), "--exit-interval", str(first))
    legs = search.pair("kernel", "--trace-level", "kernel", "--trace-dump", layer_prefix(verdict), *window)
    closer, found = search.traces(legs)
    if found is None:
        if closer.exit != Exit.SAME:
            return closer
        note = (
            "  traced by kernel the runs agreed: the difference comes and goes; this is what the trace by module says"
        )
        return _named(search, metrics, verdict, replace(outcome, details=(note, *outcome.details)), None)
    return _named(search, metrics, found, closer, legs)


def _by_module(search: _Search, iteration: int) -> tuple[Outcome, Verdict | None]:
    """Trace by module in the iteration that differed; where this pair differs elsewhere, once more and wider."""
    for name, start in (("module", iteration), ("module_wide", 1)):
        window = ("--trace-iterations", f"{start}:{iteration}", "--exit-interval", str(iteration))
        legs = search.pair(name, "--trace-level", "module", *window)
        outcome, verdict = search.traces(legs)
        if verdict is not None or outcome.exit != Exit.SAME:
            break
    return outcome, verdict


def layer_prefix(verdict: Verdict) -> str:
    """Beginning of the scopes whose arguments are worth keeping: the layer of the first mismatch."""
    scope = verdict.first.mismatch.left.scope
    found = re.match(r"(?:decoder|mtp)\.layers\.\d+|[^.:|]*", scope)
    return found[0] if found else ""


def _not_repeated(search: _Search, metrics: Outcome, last: Outcome) -> Outcome:
    if last.exit != Exit.SAME:
        return replace(last, details=(*last.details, *setting_lines(metrics.facts)))
    first = metrics.facts["first_difference"]
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"{metrics.verdict}; the legs that were traced agreed, so the difference comes and goes",
        details=metrics.details,
        next_action="run bisect again, or trace all iterations with --trace-level module",
        facts={"iteration": first["iteration"], "fields": list(first["fields"]), "op": None, "levels": search.levels},
    )


def _named(
    search: _Search, metrics: Outcome, verdict: Verdict, outcome: Outcome, legs: tuple[Path, Path] | None
) -> Outcome:
    """The report: what was found, who chose what, and the reproducer where arguments were kept."""
    first, difference = verdict.first, metrics.facts["first_difference"]
    script, chosen = None, []
    if legs is not None:
        traces = legs[0] / "trace", legs[1] / "trace"
        script = write_reproducer(search.folder / "reproducer", verdict, traces)
        chosen = choices(verdict, traces)
    module = first.mismatch.left.scope.partition("|")[0].partition(":")[0]
    lines = [
        f"  in the fingerprints first at iteration {difference['iteration']}, in {', '.join(difference['fields'])}"
    ]
    lines += setting_lines(metrics.facts) + list(outcome.details)
    lines += choice_lines(chosen)
    lines.append(f"  reproducer: {script}" if script else "  reproducer: none, the event's arguments were not kept")
    facts = {
        **outcome.facts,
        "iteration": first.mismatch.at["iteration"],
        "op": first.mismatch.left.name,
        "module": module,
        "phase": first.mismatch.left.phase,
        "origin_ranks": list(verdict.ranks),
        "mechanism": first.mechanism.name,
        "fingerprint_difference": difference,
        **{part: metrics.facts[part] for part in ("differing_inputs", "differing_settings")},
        "chosen": chosen,
        "reproducer": None if script is None else str(script),
        "levels": search.levels,
    }
    where = f"{first.mechanism.name}: {describe_place(first)}, {verdict.spread}"
    action = outcome.next_action
    if first.mechanism in TO_REPEAT:
        action = "run the reproducer; " * (script is not None) + first.mechanism.action
    return replace(outcome, exit=Exit.DIFFERENT, verdict=where, details=tuple(lines), next_action=action, facts=facts)


def _parted(leg: Path, running: Path) -> bool:
    """Whether a line that a running leg has written is not the other leg's."""
    try:
        pair = [(at / "fingerprint" / FINGERPRINT_FILE).read_bytes().split(b"\n")[:-1] for at in (leg, running)]
    except FileNotFoundError:
        return False
    return any(differing_fields(json.loads(mine), json.loads(other)) for mine, other in zip(*pair, strict=False))


def _run_leg(command: Sequence[str], leg: Path, until: Callable[[], bool] | None) -> None:
    """Run one leg to its end, or until it may stop, its output beside its folder."""
    print(f"{leg.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    left = leg / "fingerprint" / MANIFEST_FILE
    failure = run_leg(command, leg.with_suffix(".log"), until=until, leaves=left)
    if failure is not None:
        raise _LegFailedError(failure)
