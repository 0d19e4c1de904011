"""tax: what deterministic mode costs, measured against the fastest way the machine has."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.determinism.report import Exit, Outcome
from megatron.determinism.tax_legs import (
    BASELINE,
    DETERMINISTIC,
    FLAGS,
    Knob,
    Leg,
    LegFailedError,
    Legs,
    knobs_of,
    usage,
)
from megatron.determinism.tax_report import draw_chart, write_page
from megatron.determinism.tax_statistics import estimate, judge, round_order
from megatron.determinism.verify import names_flag

DEFAULT_PAIRS = 6
REPORT, PAGE, CHART = "report.json", "report.html", "tax.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to measure: pairs of legs, the largest tax accepted, knobs or not, iterations to leave out.

    ``gpu_sets``: disjoint sets of GPUs on which pairs run side by side; none: one pair at a time, on the whole machine.
    ``limit_s``: no pair after the first ones begins that would not be over, profiles included, within so many seconds.
    """

    pairs: int = DEFAULT_PAIRS
    max_tax: float | None = None
    ablate: bool = False
    warm_up: int | None = None
    gpu_sets: tuple[str, ...] = ()
    limit_s: float | None = None


@dataclass(slots=True)
class _Rounds:
    """Legs run so far, by name and number of their pair (from 0), and knobs that failed."""

    legs: dict[str, dict[int, Leg]] = field(default_factory=dict)
    knobs: list[Knob] = field(default_factory=list)
    failed: dict[str, Outcome] = field(default_factory=dict)

    def of(self, name: str) -> list[Leg]:
        """The legs of a name, by pair."""
        return [leg for _, leg in sorted(self.legs.get(name, {}).items())]

    def times(self, name: str) -> list[float]:
        """Step times of a leg by pair, in seconds."""
        return [leg.step_s for leg in self.of(name)]

    def step_s(self, name: str) -> float:
        """Median step time of a leg over the pairs, in seconds."""
        return statistics.median(self.times(name))

    @property
    def names(self) -> list[str]:
        """What belongs to a pair: both sides, and the knobs that can be switched."""
        return [BASELINE, DETERMINISTIC, *(knob.name for knob in self.knobs if knob.flags)]

    @property
    def longest_s(self) -> float:
        """How long the longest leg took from start to end."""
        return max(leg.wall_s for legs in self.legs.values() for leg in legs.values())


def default_folder(now: datetime.datetime) -> Path:
    """Where the legs go when no folder is named."""
    return Path("runs") / f"tax_{now:%Y%m%d_%H%M%S}"


def tax(launch: Sequence[str], folder: Path, request: Request) -> Outcome:
    """Measure ``launch`` in deterministic mode against the same command with the fastest variant of everything.

    A pair is one leg of each kind, in fresh processes, on the same GPUs one after the other, forward and backward in
    turn; one leg more of each kind is profiled. ``folder`` gets the legs, ``report.json``, ``report.html`` and
    ``tax.png``.
    """
    if names_flag(launch, "--op-variants"):
        return Outcome(
            exit=Exit.NOT_COMPARABLE, verdict="leave --op-variants out of the command: each leg gets its own"
        )
    if folder.exists() and any(folder.iterdir()):
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"{folder} is not empty; name another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    legs = Legs(launch=launch, folder=folder, warm_up=request.warm_up, gpu_sets=request.gpu_sets)
    try:
        rounds = _run_rounds(legs, request)
        used = _profile(legs, rounds)
    except LegFailedError as error:
        return error.outcome
    return _report(launch, folder, request, rounds, used)


def _run_rounds(legs: Legs, request: Request) -> _Rounds:
    """All pairs, side by side as far as there are places. The knobs follow from the first legs.

    Raises:
        LegFailedError: a leg of the two kinds failed; a knob that fails is only left out.
    """
    rounds, began = _Rounds(), time.monotonic()
    for start in range(0, request.pairs, legs.places):
        if start and request.limit_s is not None:
            turns = len(rounds.names) + len(FLAGS) / min(legs.places, len(FLAGS))
            if time.monotonic() - began + turns * rounds.longest_s > request.limit_s:
                break
        pairs = range(start, min(start + legs.places, request.pairs))
        _run_pairs(legs, rounds, rounds.names, pairs)
        if start == 0:
            _require_modes(rounds)
            if request.ablate:
                rounds.knobs = knobs_of(rounds.legs[DETERMINISTIC][0], rounds.legs[BASELINE][0])
                _run_pairs(legs, rounds, rounds.names[len(FLAGS) :], pairs)
    return rounds


def _run_pairs(legs: Legs, rounds: _Rounds, names: Sequence[str], pairs: Sequence[int]) -> None:
    """The legs ``names`` of some pairs, each pair in a place of its own. All places begin a leg together, so that none
    starts up while another is measured; half of them have the other order."""
    orders = {pair: round_order(names, sum(divmod(pair, legs.places))) for pair in pairs}
    with legs.threads() as threads:
        for turn in range(len(names)):
            list(threads.map(lambda pair, at=turn: _run_one(legs, rounds, orders[pair][at], pair), pairs))


def _run_one(legs: Legs, rounds: _Rounds, name: str, pair: int) -> None:
    if name in rounds.failed:
        return
    flags = FLAGS.get(name) or next(knob.flags for knob in rounds.knobs if knob.name == name)
    words = "".join(c if c.isalnum() else "_" for c in name)
    try:
        leg = legs.run(f"{words}_{pair + 1}", flags, pair % legs.places)
    except LegFailedError as error:
        if name in FLAGS:
            raise
        rounds.failed[name] = error.outcome
    else:
        rounds.legs.setdefault(name, {})[pair] = leg


def _profile(legs: Legs, rounds: _Rounds) -> dict[str, dict[str, Any]]:
    """What a leg of each kind uses."""
    with legs.threads() as threads:
        found = threads.map(
            lambda place, name: legs.profile(f"profile_{name}", FLAGS[name], rounds.legs[name][0], place % legs.places),
            range(len(FLAGS)),
            FLAGS,
        )
        return {name: usage(leg, rounds.step_s(name)) for name, leg in zip(FLAGS, found, strict=True)}


def _require_modes(rounds: _Rounds) -> None:
    """The flags behind the command have to reach the training script."""
    for name, wanted in ((BASELINE, False), (DETERMINISTIC, True)):
        leg = rounds.legs[name][0]
        if leg.deterministic != wanted:
            words = f"{leg.folder}: the command did not take {shlex.join(FLAGS[name])}; it has to pass on further flags"
            raise LegFailedError(Outcome(exit=Exit.NOT_COMPARABLE, verdict=words))


def _report(
    launch: Sequence[str], folder: Path, request: Request, rounds: _Rounds, used: Mapping[str, dict[str, Any]]
) -> Outcome:
    base, ours = rounds.times(BASELINE), rounds.times(DETERMINISTIC)
    found = estimate(ours, base)
    code, word, sentence = judge(found, request.max_tax)
    first = rounds.legs[DETERMINISTIC][0]
    same = all(leg.losses == first.losses for leg in rounds.of(DETERMINISTIC))
    places = request.gpu_sets or ("",)
    if rounds.failed:
        code, word, sentence = Exit.DAMAGED, "failed", f"; legs of {', '.join(rounds.failed)} failed"
    count = f"{len(ours)} pair{'s' * (len(ours) != 1)}"
    if len(ours) < request.pairs:
        count = f"{len(ours)} of {request.pairs} pairs: no more fit into --limit-s {request.limit_s:g}"
    verdict = f"tax {found.text}, {count}{sentence}"
    facts: dict[str, Any] = {
        "verdict": word,
        "exit_code": int(code),
        "message": verdict,
        "command": list(launch),
        "tax": found.tax,
        "interval": found.interval,
        "confidence": found.confidence,
        "interval_method": found.method,
        "max_tax": request.max_tax,
        "pairs": [
            {"baseline_s": b, "deterministic_s": d, "ratio": d / b, "gpus": places[pair % len(places)]}
            for pair, (b, d) in enumerate(zip(base, ours, strict=True))
        ],
        "at_once": len(places),
        "leg_s": statistics.median(leg.wall_s for name in FLAGS for leg in rounds.of(name)),
        "iterations": list(first.iterations),
        "world_size": first.manifest["launch"]["world_size"],
        "deterministic_legs_agree": same,
        **{name: {"step_s": rounds.step_s(name), **used[name], "ops": rounds.legs[name][0].ops} for name in FLAGS},
        "where": _where(used, rounds),
        "ablation": _ablation(rounds) if request.ablate else None,
        "dir": str(folder),
        "report": str(folder / PAGE),
        "chart": str(folder / CHART),
    }
    draw_chart(folder / CHART, facts)
    write_page(folder / PAGE, facts, CHART)
    (folder / REPORT).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    return Outcome(exit=code, verdict=verdict, details=tuple(_lines(facts)), facts=facts)


def _where(used: Mapping[str, dict[str, Any]], rounds: _Rounds) -> dict[str, float] | None:
    """Seconds a step that the deterministic leg spends more, by group of kernels and idle; ``None`` without a GPU."""
    groups = used[BASELINE]["kernel_groups"], used[DETERMINISTIC]["kernel_groups"]
    if groups[0] is None or groups[1] is None:
        return None
    more = {name: groups[1].get(name, 0.0) - groups[0].get(name, 0.0) for name in {**groups[1], **groups[0]}}
    idle = {name: rounds.step_s(name) - used[name]["gpu_busy_s"] for name in FLAGS}
    by_cost = dict(sorted(more.items(), key=lambda item: -item[1]))
    return {**by_cost, "idle": idle[DETERMINISTIC] - idle[BASELINE]}


def _ablation(rounds: _Rounds) -> list[dict[str, Any]]:
    """What each knob costs: the deterministic leg against the same with only that knob at its fastest."""
    rows = []
    for knob in rounds.knobs:
        row: dict[str, Any] = {"knob": knob.name, "tax": None, "interval": None, "note": knob.note}
        if knob.name in rounds.failed:
            row["note"] = rounds.failed[knob.name].verdict
        elif knob.flags:
            found = estimate(rounds.times(DETERMINISTIC), rounds.times(knob.name))
            row |= {**asdict(found), "step_s": rounds.times(knob.name), "flags": list(knob.flags)}
        rows.append(row)
    return rows


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """The report for people who read a terminal."""
    lines = [f"  interval: {facts['interval_method']}"]
    if not facts["deterministic_legs_agree"]:
        lines.append("  WARNING: losses of the deterministic legs differ")
    for name in FLAGS:
        of = facts[name]
        words = f"  {name:<14} step {of['step_s']:.4f} s"
        if of["gpu_idle_share"] is not None:
            words += (
                f", peak memory {of['peak_memory_bytes'] / 1e9:.2f} GB, GPU idle {of['gpu_idle_share']:.1%}, exposed "
                f"communication {of['exposed_communication_s'] * 1e3:.1f} ms, {of['launches']:.0f} launches a step"
            )
        else:
            words += f", peak memory of a process {of['peak_host_memory_bytes'] / 1e9:.2f} GB; no GPU"
        lines.append(words)
    for name, seconds in (facts["where"] or {}).items():
        lines.append(f"  {name:<20} {seconds * 1e3:+8.2f} ms a step")
    for row in facts["ablation"] or ():
        cost = "" if row["tax"] is None else format(row["tax"], "+.2%")
        ends = "" if row["interval"] is None else " [{:+.2%}, {:+.2%}]".format(*row["interval"])
        lines.append(f"  {row['knob']:<20} {cost}{ends}  {row['note']}")
    return [*lines, f"  report: {facts['report']}"]
