"""From the first mismatch of every rank to a verdict: who made the difference, who received it, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.trace.format import event_start
from megatron.determinism.trace_mechanism import RACE, Mechanism, drifting, next_action, of_inputs, of_origin, of_state
from megatron.determinism.trace_read import RankStream
from megatron.determinism.trace_scan import TRAVELS, Mismatch, RankScan, transfer_keys

ORIGIN, RECEIVER, OUTSIDE = "candidate_origin", "downstream_receiver", "outside_capture"


@dataclass(frozen=True, slots=True)
class Finding:
    """One rank's first mismatch, classified. ``source`` are the ranks that sent a difference to a receiver."""

    rank: int
    at: Mapping[str, int]
    kind: str
    mismatch: Mismatch
    mechanism: Mechanism
    source: tuple[int, ...] = ()

    @property
    def place(self) -> tuple[str, str, str]:
        """Scope, operation and phase."""
        event = self.mismatch.left
        return event.scope, event.name, event.phase

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        event = self.mismatch.left
        return {
            "rank": self.rank,
            "coordinates": dict(self.at),
            "class": self.kind,
            **self.mismatch.at,
            "phase": event.phase,
            "scope": event.scope,
            "op": event.name,
            "kind": event.kind,
            "occurrence": event.occurrence,
            "inputs_differ": list(self.mismatch.inputs),
            "outputs_differ": list(self.mismatch.outputs),
            "arguments_differ": self.mismatch.args,
            "mechanism": self.mechanism.name,
            "from_ranks": list(self.source),
            "dump": [e.meta.get("dump") for e in (event, self.mismatch.right)],
            "variant": event.meta.get("variant"),
            "config": [e.meta.get("config") for e in (event, self.mismatch.right)],
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks' findings joined."""

    findings: tuple[Finding, ...]
    first: Finding
    ranks: tuple[int, ...]
    spread: str
    action: str


def classify(scan: RankScan, scans: Mapping[int, RankScan], stream: RankStream) -> Finding:
    """What a rank's first mismatch is. ``stream`` is the rank's file in run A, to look for who made an input."""
    first = scan.first
    event, configurations = first.left, [c for s in scans.values() for c in s.configurations]
    if event.kind == "state":
        mechanism = of_state(first, scan, list(scans.values()))
        return Finding(scan.rank, scan.at, OUTSIDE, first, mechanism)
    if event.kind == "input":
        return Finding(scan.rank, scan.at, OUTSIDE, first, of_inputs(first, False))
    if first.inputs:
        mechanism = of_inputs(first, produced_before(first, "ins", stream))
        kind = ORIGIN if mechanism.name == "uninitialised_read" else OUTSIDE
        return Finding(scan.rank, scan.at, kind, first, mechanism)
    if event.kind in TRAVELS:
        source = _senders(scan, scans)
        if source:
            mechanism = Mechanism("received", f"received from {_ranks(source)}", "look at the rank it came from")
            return Finding(scan.rank, scan.at, RECEIVER, first, mechanism, source)
        missing = [rank for rank in event.meta["ranks"] if rank not in scans]
        if missing:
            mechanism = Mechanism("untraced_peer", f"{_ranks(missing)} was not traced", "trace all ranks")
            return Finding(scan.rank, scan.at, OUTSIDE, first, mechanism)
    if event.kind == "module" and produced_before(first, "outs", stream):
        # What it hands on was right when the last operation inside it was recorded.
        return Finding(scan.rank, scan.at, ORIGIN, first, RACE)
    return Finding(scan.rank, scan.at, ORIGIN, first, of_origin(first, configurations))


def _senders(scan: RankScan, scans: Mapping[int, RankScan]) -> tuple[int, ...]:
    """Other members of the transfer that gave something else in the two runs."""
    event = scan.first.left
    keys = transfer_keys(scan.first.at["iteration"], event, scan.first.outputs)
    return tuple(r for r in event.meta["ranks"] if r != scan.rank and r in scans and scans[r].carried & set(keys))


def produced_before(mismatch: Mismatch, side: str, stream: RankStream) -> bool:
    """Whether an earlier event of the same iteration wrote what run A read (``ins``) or handed on (``outs``) here."""
    wanted = {a.digest.encode() for a, _ in mismatch.pairs(side)}
    for segment in stream.segments():
        if segment.at["iteration"] != mismatch.at["iteration"]:
            continue
        here = dict(segment.key) == mismatch.at
        for raw in segment.events:
            head, found, results = raw.partition(b'],"r":[')
            if here and _is_event(head, mismatch):
                return False
            if found and any(digest in results for digest in wanted):
                return True
        if here:
            return False
    return False


def _is_event(head: bytes, mismatch: Mismatch) -> bool:
    event = mismatch.left
    before, after = event_start(event.kind, event.scope, event.name, event.phase)
    return head.startswith(f"{before}{event.occurrence}{after}".encode())


def join(findings: Sequence[Finding], scans: Mapping[int, RankScan], level: str, start: int) -> Verdict:
    """The verdict over ranks, of traces of a level from iteration ``start`` on. Origins come before what entered from
    outside, and that before receivers."""
    rank_of_class = {ORIGIN: 0, OUTSIDE: 1, RECEIVER: 2}
    first = min(findings, key=lambda f: (f.mismatch.at["iteration"], rank_of_class[f.kind], f.mismatch.order, f.rank))
    same = tuple(f.rank for f in findings if f.kind == first.kind and f.place == first.place)
    if first.mechanism.name == "replica_drift":
        minority = drifting(list(scans.values()), first.mismatch.at["iteration"])
        same = tuple(sorted({rank for ranks in minority.values() for rank in ranks}))
    action = next_action(first.mechanism, level, start)
    return Verdict(tuple(findings), first, same, _spread(first, same, scans), action)


def _spread(first: Finding, ranks: tuple[int, ...], scans: Mapping[int, RankScan]) -> str:
    """What it means that these ranks, and not others, show it first."""
    event = first.mismatch.left
    runners = [r for r, s in scans.items() if s.at.get("pp") == first.at.get("pp")]
    if event.kind in TRAVELS:
        runners = [r for r in event.meta["ranks"] if r in scans]
    if set(ranks) >= set(runners):
        what = "the operation itself" if first.kind == ORIGIN else "what reaches it, on every rank"
        return f"all ranks that run it ({_ranks(ranks)}): {what}"
    shared = [
        f"{axis}={value}"
        for axis, value in first.at.items()
        if all(scans[r].at.get(axis) == value for r in ranks) and any(scans[r].at.get(axis) != value for r in runners)
    ]
    one = len(ranks) == 1
    held = f" ({'its' if one else 'their'} {', '.join(shared)})" if shared else ""
    return (
        f"only {_ranks(ranks)} of {', '.join(map(str, runners))} {'differs' if one else 'differ'} at first{held}, so "
        f"less the operation itself than something about {'that rank' if one else 'those ranks'}: topology, placement, "
        "inputs or order of reduction"
    )


def _ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks))
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
