"""What came of the launches on one host, for a terminal, for documentation and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

NAME = "one_node"
GOOD, BAD, OPEN = "#d5efd5", "#f4c4c4", "#eeeeee"
HEAD = ("layout", "ranks", "two launches", "stopped", "gone on with", "same as", "step")


def rows_of(facts: Mapping[str, Any]) -> list[list[tuple[str, bool | None]]]:
    """A row for each layout that was launched whole, in columns as ``HEAD``; each cell a text, and whether what it
    says is as promised (``None``: nothing is promised, or not known)."""
    launches = facts["launches"]
    rows = []
    for first in launches.values():
        if first["role"] != "first":
            continue
        layout = first["layout"]
        others = [launches.get(f"{layout}: {role}") for role in ("again", "stopped", "gone on with")]
        same = ("", None) if first["against"] is None else (first["against"].partition(":")[0], first["good"])
        own = [(layout, None), (str(first["ranks"]), None)]
        rows.append([*own, *(_cell(other) for other in others), same, (_step(launches, layout), None)])
        if first["status"] != "ran":
            rows[-1][2] = (first["status"], first["good"])
    return rows


def _cell(launch: Mapping[str, Any] | None) -> tuple[str, bool | None]:
    """Iterations that are identical, or what is wrong."""
    if launch is None:
        return "", None
    if launch["good"]:
        first, last = launch["iterations"]
        return f"identical, {first} to {last}", True
    if launch["good"] is None:
        return launch["status"] if launch["status"] != "ran" else "not compared", None
    return "FAILED" if launch["status"] == "failed" else "DIFFERENT", False


def _step(launches: Mapping[str, Mapping[str, Any]], layout: str) -> str:
    """Median step of the launches of a layout, and its memory where it is known; the unprofiled one where there are
    two."""
    own = [launches.get(f"{layout}: {role}") for role in ("again", "first")]
    times = [launch["step_ms"] for launch in own if launch is not None and launch.get("step_ms")]
    peaks = [launch["peak_memory_bytes"] for launch in own if launch is not None and launch.get("peak_memory_bytes")]
    return (f"{times[0]:.0f} ms" if times else "") + (f", {max(peaks) / 1e9:.1f} GB" if peaks else "")


def further_of(facts: Mapping[str, Any]) -> list[tuple[str, str, bool | None]]:
    """Launches beside the layouts: gone on with elsewhere, and the control; name, what was seen, as promised."""
    found = []
    for name, launch in facts["launches"].items():
        if launch["role"] in ("first", "again", "stopped", "gone on with"):
            continue
        if launch["same"]:
            text, good = _cell(launch)
            words = f"{text}, to {launch['against'].partition(':')[0]}" if good else text
        else:
            good = launch["good"]
            words = launch["seen"].strip().splitlines()[-1] if launch["seen"] else launch["status"]
            words += " (has to differ)"
        found.append((name, words, good))
    return found


def verdict(facts: Mapping[str, Any]) -> str:
    """One sentence over all launches."""
    launches = facts["launches"].values()
    broken = sum(launch["good"] is False for launch in launches)
    kept = sum(launch["good"] is True for launch in launches)
    missing = sum(launch["status"] == "not run" for launch in launches)
    words = f"{kept} comparisons as promised, {broken} not" if broken else f"all {kept} comparisons as promised"
    words = words if kept or broken else "nothing was compared"
    words += f"; {missing} launches not run" if missing else ""
    return f"{words}; {len(launches) - missing} launches in {facts['seconds']:.0f} s"


def missing_of(facts: Mapping[str, Any]) -> list[str]:
    """What was not run, and why."""
    own = [f"{name}: {of['seen']}" for name, of in facts["launches"].items() if of["status"] == "not run"]
    return [*own, *(f"{name}: {facts['gpus']} GPUs are too few" for name in facts["left_out"])]


def table(facts: Mapping[str, Any]) -> str:
    """For a terminal."""
    rows = [HEAD, *([text for text, _ in row] for row in rows_of(facts))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{'BAD ' if good is False else ''}{name}: {words}" for name, words, good in further_of(facts)]
    lines += [f"not run: {words}" for words in missing_of(facts)]
    for name, launch in facts["launches"].items():
        if launch["good"] is False:
            lines += [f"BAD {name}:", *(f"    {line}" for line in launch["seen"].strip().splitlines()[-12:])]
    return "\n".join([*lines, verdict(facts)])


def markdown(facts: Mapping[str, Any]) -> str:
    """For documentation."""
    intro = f"{facts['place']}, torch {facts['torch']}, {facts['steps']} iterations"
    head = _head(facts)
    lines = [f"{intro}: {verdict(facts)}.", "", _line(head), _line(["---"] * len(head))]
    lines += [_line([text for text, _ in row]) for row in rows_of(facts)]
    lines += ["", _line(["further launches", "seen"]), _line(["---"] * 2)]
    lines += [_line([name, words]) for name, words, _ in further_of(facts)]
    missing = missing_of(facts)
    lines += ["", "Not run:", "", *(f"* {words}" for words in missing)] if missing else []
    return "\n".join(lines) + "\n"


def _head(facts: Mapping[str, Any]) -> list[str]:
    several = facts["devices"] > 1
    stopped = f"stopped after {facts['stop']}{', devices reversed' * several}"
    return [*HEAD[:3], stopped, f"gone on with{', devices rotated' * several}", "one trajectory with", HEAD[-1]]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Draw the table, green where a promise was kept, red where not."""
    rows = rows_of(facts)
    further = [[(name, None), ("", None), (words, good), *[("", None)] * 4] for name, words, good in further_of(facts)]
    cells = rows + further
    figure = Figure(figsize=(15, 0.6 + 0.25 * (len(cells) + 1)))
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(f"{facts['place']}: {verdict(facts)}", fontsize=11)
    if cells:
        colours = [
            [{True: GOOD, False: BAD, None: OPEN if not at else "white"}[ok] for at, (_, ok) in enumerate(row)]
            for row in cells
        ]
        grid = axes.table(
            cellText=[[text[:54] for text, _ in row] for row in cells],
            cellColours=colours,
            colLabels=_head(facts),
            colWidths=[0.16, 0.04, 0.28, 0.18, 0.16, 0.12, 0.08],
            cellLoc="left",
            loc="upper center",
        )
        grid.auto_set_font_size(False)
        grid.set_fontsize(8)
        grid.scale(1, 1.25)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def write_report(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the page and the picture."""
    (folder / f"{NAME}.md").write_text(markdown(facts), "utf-8")
    draw(folder / f"{NAME}.png", facts)
