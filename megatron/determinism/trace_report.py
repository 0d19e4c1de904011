"""One page about a comparison of traces: the verdict, every rank's first mismatch, and how it spread over layers."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.determinism.trace_scan import Mismatch, RankScan
from megatron.determinism.trace_verdict import ORIGIN, RECEIVER, Finding, Verdict

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 1.6em }
table { border-collapse: collapse } td, th { border: 1px solid #ddd; padding: .25em .6em; text-align: left }
th { background: #f5f5f5 } code { font-size: .92em }
.candidate_origin { background: #ffd9d4 } .downstream_receiver { background: #fff3cf }
.outside_capture { background: #e3e8ff }
.same { color: #999 } .verdict { background: #f5f5f5; padding: .8em 1em; border-left: 4px solid #c33 }
"""


def write_report(path: Path, verdict: Verdict, scans: Mapping[int, RankScan], facts: Mapping[str, Any]) -> None:
    """Write the page: a single HTML file without scripts."""
    first = verdict.first
    event = first.mismatch.left
    rows = "".join(_finding_row(f) for f in verdict.findings)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Where two runs part</title><style>{_STYLE}</style></head><body>
<h1>Where two runs part</h1>
<p>A: <code>{_safe(facts["a"])}</code><br>B: <code>{_safe(facts["b"])}</code><br>
{facts["common_events"]} common events on {len(scans)} ranks, {facts["extra_events"]} in one run only</p>
<div class="verdict"><b>{_safe(first.kind)}: {_safe(event.name)}</b> in <code>{_safe(event.scope)}</code>,
{_place(first.mismatch)}<br><b>{_safe(first.mechanism.name)}</b>: {_safe(first.mechanism.text)}<br>
over ranks: {_safe(verdict.spread)}<br>next: {_safe(verdict.action)}</div>
<h2>First mismatch of each rank</h2>
<table><tr><th>rank</th><th>stands at</th><th>class</th><th>when</th><th>operation</th><th>scope</th>
<th>tensors</th><th>why</th></tr>{rows}</table>
<h2>How it spread: first mismatch by layer and rank</h2>
<p>Numbers count the events of a rank; the darker, the earlier.</p>
{_timeline(verdict, scans)}
</body></html>
"""
    path.write_text(page, encoding="utf-8")


def _safe(text: object) -> str:
    return html.escape(str(text))


def _place(mismatch: Mismatch) -> str:
    return ", ".join(f"{_safe(key)} {_safe(value)}" for key, value in mismatch.at.items())


def _finding_row(finding: Finding) -> str:
    mismatch, kind = finding.mismatch, finding.kind
    event = mismatch.left
    tensors = ", ".join([*(f"in {t}" for t in mismatch.inputs[:6]), *(f"out {t}" for t in mismatch.outputs[:6])])
    stands = " ".join(f"{axis}={value}" for axis, value in finding.at.items())
    cells = (finding.rank, stands, kind, _place(mismatch), event.name, event.scope, tensors, finding.mechanism.text)
    return f'<tr class="{kind}">' + "".join(f"<td>{_safe(cell)}</td>" for cell in cells) + "</tr>"


def _timeline(verdict: Verdict, scans: Mapping[int, RankScan]) -> str:
    layers = {layer for scan in scans.values() for layer in scan.layers}
    orders = sorted(m.order for scan in scans.values() for m in scan.layers.values())
    kinds = {f.rank: f for f in verdict.findings}
    lines = ["<table><tr><th>layer</th>" + "".join(f"<th>rank {rank}</th>" for rank in scans) + "</tr>"]
    for layer in sorted(layers, key=_natural):
        cells = []
        for rank, scan in scans.items():
            mismatch = scan.layers.get(layer)
            if mismatch is None:
                cells.append('<td class="same">same</td>')
                continue
            shade = 1.0 - 0.75 * orders.index(mismatch.order) / max(1, len(orders) - 1)
            found = kinds.get(rank)
            mark = ""
            if found is not None and found.mismatch is mismatch:
                mark = {ORIGIN: " &#9679; origin", RECEIVER: " &#8592; received"}.get(found.kind, " ? outside")
            event = mismatch.left
            words = f"it. {mismatch.at['iteration']}, {_safe(event.phase)}, #{mismatch.order}{mark}"
            cells.append(f'<td style="background:rgba(220,60,40,{shade:.2f})">{words}<br>{_safe(event.name)}</td>')
        lines.append(f"<tr><th>{_safe(layer)}</th>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _natural(layer: str) -> list[object]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", layer)]
