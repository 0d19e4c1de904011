"""Compare two trace folders: where the runs part, on which ranks, by what, and what to do next. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.determinism.compare import as_settings, settings_said
from megatron.determinism.report import Exit, Outcome
from megatron.determinism.trace_read import TraceFolder, UnknownFormatError, open_folder
from megatron.determinism.trace_report import write_report
from megatron.determinism.trace_scan import RankScan, scan_rank
from megatron.determinism.trace_verdict import Finding, Verdict, classify, join
from megatron.training.config.manifest import differences

REPORT_FILE = "trace_compare.html"
_SHOWN = 8


def trace_compare(left: Path, right: Path, *, force: bool = False, report: Path | None = None) -> Outcome:
    """Whether two runs did the same at every event that both traces have.

    With ``force`` runs whose fixed inputs differ are compared all the same. A page with the timeline goes to
    ``report`` (default: into ``right``) where something differs.
    """
    return compare_folders(left, right, force=force, report=report)[0]


def compare_folders(
    left: Path, right: Path, *, force: bool = False, report: Path | None = None
) -> tuple[Outcome, Verdict | None]:
    """As ``trace_compare``; also the verdict where something differs."""
    started = time.monotonic()
    try:
        folders = open_folder(left), open_folder(right)
        problems = _not_comparable(*folders, force=force)
        if problems:
            said, *others = problems
            details = tuple(f"  {problem}" for problem in others)
            outcome = Outcome(
                exit=Exit.NOT_COMPARABLE,
                verdict=f"not comparable: {said}",
                details=details,
                facts={"a": str(left), "b": str(right), "problems": problems},
            )
            return outcome, None
        scans = _scan(*folders)
        findings = [
            classify(scan, scans, folders[0].stream(rank)) for rank, scan in scans.items() if scan.first is not None
        ]
    except DamagedInputError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"damaged or missing: {error}"), None
    except UnknownFormatError as error:
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"not comparable: {error}"), None
    facts = {
        "a": str(left),
        "b": str(right),
        "ranks": sorted(scans),
        "common_events": sum(scan.common for scan in scans.values()),
        "extra_events": sum(count for scan in scans.values() for _, count in scan.extra.values()),
        "cut_off": [text for scan in scans.values() for text in scan.cut],
        "configurations_differ": [c for scan in scans.values() for c in scan.configurations],
        "seconds": round(time.monotonic() - started, 3),
    }
    if not findings:
        return _no_difference(scans, facts), None
    verdict = join(findings, scans, folders[0].level, _window(*folders)[0])
    page = report if report is not None else right / REPORT_FILE
    try:
        write_report(page, verdict, scans, facts)
        where = str(page)
    except OSError as error:
        where = f"could not be written ({error})"
    return _different(verdict, scans, {**facts, "report": where}), verdict


def _not_comparable(left: TraceFolder, right: TraceFolder, *, force: bool) -> list[str]:
    """Why these traces say nothing about one another."""
    problems = []
    inputs = differences(left.trajectory, right.trajectory)
    if inputs and not force:
        problems.append(f"{len(inputs)} fixed input{'s' * (len(inputs) != 1)} differ{'s' * (len(inputs) == 1)}")
        problems += settings_said({"differing_inputs": as_settings(inputs)})
    layouts = left.launch.get("physical_layout"), right.launch.get("physical_layout")
    if layouts[0] != layouts[1]:
        mine, theirs = (", ".join(f"{name} {size}" for name, size in (each or {}).items()) for each in layouts)
        problems.append(f"the ranks are laid out differently: {mine} in A, {theirs} in B")
    if left.level != right.level:
        problems.append(f"the levels differ: {left.level} in A, {right.level} in B")
    if not set(left.ranks) & set(right.ranks):
        problems.append(f"no rank in common: {_listed(left.ranks)} in A, {_listed(right.ranks)} in B")
    first, last = _window(left, right)
    if last is not None and first > last:
        mine, theirs = (f"{begin} to {end or 'the end'}" for begin, end in (left.window, right.window))
        problems.append(f"no iteration in common: {mine} in A, {theirs} in B")
    return problems


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _window(left: TraceFolder, right: TraceFolder) -> tuple[int, int | None]:
    ends = [end for _, end in (left.window, right.window) if end is not None]
    return max(left.window[0], right.window[0]), min(ends, default=None)


def _scan(left: TraceFolder, right: TraceFolder) -> dict[int, RankScan]:
    scans = {}
    for rank in sorted(set(left.ranks) & set(right.ranks)):
        scans[rank] = scan_rank(rank, left.stream(rank), right.stream(rank), _window(left, right))
    return scans


def _extra_lines(scans: dict[int, RankScan]) -> list[str]:
    lines = []
    for scan in scans.values():
        for run in "AB":
            found = [entry for (owner, _), entry in scan.extra.items() if owner == run]
            if found:
                event, count = found[0][0], sum(count for _, count in found)
                lines.append(
                    f"  rank {scan.rank}: {count} event{'s' * (count != 1)} in {run} only, the first one "
                    f"{event.name} in {event.scope or 'no module'}"
                )
    return lines


def _no_difference(scans: dict[int, RankScan], facts: dict[str, Any]) -> Outcome:
    common = facts["common_events"]
    if facts["cut_off"]:
        verdict = f"cut off: no difference in the {common} events that can be read, and the rest is missing"
        return Outcome(
            exit=Exit.DAMAGED, verdict=verdict, details=tuple(f"  {t}" for t in facts["cut_off"]), facts=facts
        )
    strange = [str(rank) for rank, scan in scans.items() if not scan.common]
    if strange:
        what = "no event in common" if facts["extra_events"] else "neither holds an event of the iterations both trace,"
        ranks = f" on rank{'s' * (len(strange) != 1)} {', '.join(strange)}"
        extra = tuple(_extra_lines(scans))
        return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"not comparable: {what}{ranks}", details=extra, facts=facts)
    verdict = f"no difference in {common} events of {len(scans)} rank{'s' * (len(scans) != 1)}"
    return Outcome(exit=Exit.SAME, verdict=verdict, details=tuple(_extra_lines(scans)), facts=facts)


def describe_place(finding: Finding) -> str:
    """Where a finding is, in words."""
    event, at = finding.mismatch.left, finding.mismatch.at
    where = event.scope or "outside any module"
    coordinates = ", ".join(f"{key} {at[key]}" for key in ("chunk", "shard", "microbatch") if key in at)
    return f"iteration {at['iteration']}, {event.phase}{', ' * bool(coordinates)}{coordinates}: {event.name} in {where}"


def _finding_lines(finding: Finding) -> list[str]:
    mismatch = finding.mismatch
    parts = [
        f"{what} {', '.join(labels[:_SHOWN])}{' ...' * (len(labels) > _SHOWN)}"
        for what, labels in (("inputs", mismatch.inputs), ("outputs", mismatch.outputs))
        if labels
    ]
    parts += ["arguments"] * mismatch.args
    lines = [f"  rank {finding.rank}: {finding.kind}: {describe_place(finding)}", f"    differing: {'; '.join(parts)}"]
    return [*lines, f"    {finding.mechanism.name}: {finding.mechanism.text}"]


def _different(verdict: Verdict, scans: dict[int, RankScan], facts: dict[str, Any]) -> Outcome:
    first, mechanism = verdict.first, verdict.first.mechanism.name
    what = first.kind if first.kind == mechanism else f"{first.kind} ({mechanism})"
    lines = [line for finding in verdict.findings for line in _finding_lines(finding)]
    lines += _extra_lines(scans)
    lines += [f"  cut off: {text}" for text in facts["cut_off"]]
    lines += [f"  over ranks: {verdict.spread}", f"  report: {facts['report']}"]
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"different: {what} at {describe_place(first)}",
        details=tuple(lines),
        next_action=verdict.action,
        facts={
            **facts,
            "first_difference": first.as_json(),
            "first_mismatches": [finding.as_json() for finding in verdict.findings],
            "origin_ranks": list(verdict.ranks),
            "mechanism": mechanism,
            "verdict_over_ranks": verdict.spread,
        },
    )
