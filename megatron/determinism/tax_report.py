"""Page and chart of a tax: what it is, and where it goes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 1.6em } img { max-width: 100% }
table { border-collapse: collapse } td, th { border: 1px solid #ddd; padding: .25em .6em; text-align: left }
th { background: #f5f5f5 } .verdict { background: #f5f5f5; padding: .8em 1em; border-left: 4px solid #36c }
"""
_ROWS = {
    "step, s": ("step_s", 1.0, ".4f"),
    "peak memory of the GPU, GB": ("peak_memory_bytes", 1e-9, ".2f"),
    "peak memory of a process, GB": ("peak_host_memory_bytes", 1e-9, ".2f"),
    "share of the step the GPU is busy, %": ("gpu_utilisation", 100.0, ".1f"),
    "share of the step the GPU is idle, %": ("gpu_idle_share", 100.0, ".1f"),
    "communication, ms a step": ("communication_s", 1e3, ".2f"),
    "exposed communication, ms a step": ("exposed_communication_s", 1e3, ".2f"),
    "kernels, copies and fills launched a step": ("launches", 1.0, ".0f"),
}


def draw_chart(path: Path, facts: Mapping[str, Any]) -> None:
    """Draw the paired step times and, where they are known, what each group of kernels and each knob costs."""
    knobs = [row for row in facts["ablation"] or () if row["tax"] is not None]
    panels = 1 + bool(facts["where"]) + bool(knobs)
    figure = Figure(figsize=(9, 3.2 * panels))
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    _draw_pairs(axes.pop(0), facts)
    if facts["where"]:
        _bars(
            axes[0],
            list(facts["where"]),
            [seconds * 1e3 for seconds in facts["where"].values()],
            "more than the baseline, ms a step",
        )
        axes.pop(0)
    if knobs:
        taxes = [row["tax"] * 100 for row in knobs]
        _bars(axes[0], [row["knob"] for row in knobs], taxes, "cost of one deterministic choice, % of a step")
        for at, row in enumerate(knobs):
            if row["interval"] is not None:
                axes[0].plot([end * 100 for end in row["interval"]], [at, at], color="black", marker="|")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_pairs(axes: Axes, facts: Mapping[str, Any]) -> None:
    rounds = range(1, len(facts["pairs"]) + 1)
    for name, mark in (("baseline", "o"), ("deterministic", "s")):
        axes.plot(rounds, [pair[f"{name}_s"] for pair in facts["pairs"]], mark, label=name)
    axes.set(xlabel="pair", ylabel="step, s", title=facts["message"], xticks=list(rounds))
    axes.title.set_fontsize(9)
    axes.legend()
    axes.grid(alpha=0.3)


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], label: str) -> None:
    axes.barh(range(len(names)), values, color=["#c33" if value > 0 else "#393" for value in values])
    axes.set(yticks=list(range(len(names))), yticklabels=list(names), xlabel=label)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")


def write_page(path: Path, facts: Mapping[str, Any], chart: str) -> None:
    """Write the page: one HTML file that shows ``chart``, which lies beside it."""
    sides = facts["baseline"], facts["deterministic"]
    figures = [
        (name, *(_figure(side[key], scale, form) for side in sides)) for name, (key, scale, form) in _ROWS.items()
    ]
    groups = sides[1]["kernel_groups"] or {}
    kernels = [
        (name, *(f"{(side['kernel_groups'] or {}).get(name, 0.0) * 1e3:.2f}" for side in sides)) for name in groups
    ]
    variants = [
        (op, sides[0]["ops"].get(op, ""), ours)
        for op, ours in sides[1]["ops"].items()
        if sides[0]["ops"].get(op) != ours
    ]
    ablation = [
        (row["knob"], _figure(row["tax"], 100, "+.2f"), _ends(row["interval"]), row["note"])
        for row in facts["ablation"] or ()
    ]
    agree = "agree" if facts["deterministic_legs_agree"] else "DIFFER"
    both = ("", "baseline", "deterministic")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tax of determinism</title><style>{_STYLE}</style></head><body>
<h1>Tax of determinism</h1>
<p><code>{_safe(" ".join(facts["command"]))}</code><br>{_safe(sides[1]["device"])}, {facts["world_size"]} processes,
iterations {facts["iterations"][0]} to {facts["iterations"][-1]} of every leg</p>
<div class="verdict"><b>{_safe(facts["message"])}</b><br>
median of paired ratios less one; {_safe(facts["interval_method"])}<br>losses of the deterministic legs {agree}</div>
<p><img src="{_safe(chart)}" alt="chart"></p>
{_table("Both legs", both, figures)}
{_table("Kernels by group, ms a step", both, kernels)}
{_table("Ops whose variants differ", both, variants)}
{_table("One knob at a time", ("knob", "costs, %", "95% interval, %", ""), ablation)}
</body></html>
"""
    path.write_text(page, encoding="utf-8")


def _safe(text: object) -> str:
    return html.escape(str(text))


def _figure(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(value * scale, form)


def _ends(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0] * 100:+.2f} to {interval[1] * 100:+.2f}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title; nothing where it has no rows."""
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = "".join(f"<th>{_safe(cell)}</th>" for cell in head)
    return f"<h2>{_safe(title)}</h2><table><tr>{top}</tr>{body}</table>" if body else ""
