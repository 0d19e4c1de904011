"""Write docs/compat.md: what happens to each of Megatron's flags, and where numbers differ from Megatron-LM's.

    python tools/docs/gen_compat.py --write      after a flag was added, taken over or refused
    python tools/docs/gen_compat.py --check      exit 1 if the page is stale

The fates come from the configuration classes and ``megatron/training/config/legacy_table.py``; the names that are
Megatron's from ``tests/golden/megatron_flags.txt``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from deviations import DEVIATIONS
from generated import REPOSITORY, cell, table, write_or_check

from megatron.core.config.fields import flags_of
from megatron.training.config.legacy import LegacyFlag
from megatron.training.config.legacy_table import MEGATRON_FLAGS
from megatron.training.config.legacy_values import REFUSED_VALUES
from megatron.training.config.run import config_classes

NAMES = REPOSITORY / "tests/golden/megatron_flags.txt"

INTRODUCTION = """\
Made by `tools/docs/gen_compat.py`; do not edit.

A command line written for Megatron-LM's `pretrain_hybrid.py` works here, or is refused before anything starts with
each flag that does not, why, and what to change. No flag is ignored in silence. All values are those of
[flags.md](flags.md); a flag that is in neither list is an error, with the nearest names.
"""


def megatron_names() -> list[str]:
    """Megatron's flags; a name that ends in ``*`` stands for a family."""
    return NAMES.read_text("utf-8").split()


def fates(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by what happens to them; ``unknown`` should be empty."""
    ours = {spelling for cls in config_classes().values() for flag in flags_of(cls) for spelling in flag.spellings}
    kinds = {"ignored": "no effect", "only": "one value", "alias": "other spelling", "refused": "refused"}
    found: dict[str, list[str]] = {fate: [] for fate in ("taken", *kinds.values(), "unknown")}
    for name in names:
        legacy = MEGATRON_FLAGS.find(name)
        fate = "taken" if name in ours else kinds[legacy.kind] if legacy else "unknown"
        found[fate].append(name)
    return found


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _by_reason(kind: str) -> list[tuple[str, Sequence[LegacyFlag]]]:
    """Entries of one kind that share a reason, in the table's order."""
    groups: dict[tuple[object, ...], list[LegacyFlag]] = {}
    for entry in MEGATRON_FLAGS.entries:
        if entry.kind == kind:
            groups.setdefault((entry.reason, entry.change, entry.accepted), []).append(entry)
    return [(_code(entry.spelling for entry in group), group) for group in groups.values()]


def _sentence(text: str) -> str:
    return cell(text[:1].upper() + text[1:]) if text else ""


def flag_sections() -> list[str]:
    """One section for each fate."""
    names = megatron_names()
    counted = fates(names)
    lines = ["## How many", ""]
    lines += table(
        ("flags of Megatron-LM", "number"),
        [(fate, str(len(flags))) for fate, flags in counted.items() if flags] + [("all", str(len(names)))],
    )
    lines += ["", "## Taken", "", "With Megatron's meaning, unless listed under deviations.", ""]
    lines += ["* " + _code(sorted(counted["taken"]))]
    lines += ["", "## Taken without effect", "", "With one warning each.", ""]
    lines += table(("flag", "why"), [(names, _sentence(g[0].reason)) for names, g in _by_reason("ignored")])
    lines += ["", "## Taken with one value", "", "Any other value is refused.", ""]
    rows = [
        (names, " or ".join(f"`{value}`" for value in g[0].accepted), _sentence(g[0].reason))
        for names, g in _by_reason("only")
    ]
    lines += table(("flag", "value", "why"), rows)
    lines += ["", "## Other spellings", ""]
    aliases = [entry for entry in MEGATRON_FLAGS.entries if entry.kind == "alias"]
    rows = [(f"`{e.spelling}`", f"`{e.target}{'' if e.value is None else ' ' + e.value}`", "") for e in aliases]
    lines += table(("flag", "stands for"), [row[:2] for row in rows])
    lines += ["", "## Refused", ""]
    rows = [(names, _sentence(g[0].reason), _sentence(g[0].change)) for names, g in _by_reason("refused")]
    lines += table(("flag", "why", "instead"), rows)
    lines += ["", "## Refused values", "", "Of flags that are taken.", ""]
    rows = [(f"`{r.flag}`", _code(r.values.split()), _sentence(r.reason)) for r in REFUSED_VALUES]
    lines += table(("flag", "values", "why"), rows)
    return lines


def own_flags() -> list[str]:
    """Flags that Megatron does not have."""
    theirs = set(megatron_names())
    rows = [
        (_code(flag.spellings), cell(flag.help))
        for cls in config_classes().values()
        for flag in flags_of(cls)
        if not theirs & set(flag.spellings)
    ]
    return ["## Flags that Megatron-LM does not have", "", *table(("flag", "meaning"), rows)]


def page() -> str:
    """The Markdown page."""
    deviations = table(("what", "here", "Megatron-LM"), [(cell(a), cell(b), cell(c)) for a, b, c in DEVIATIONS])
    lines = ["# Compatibility with Megatron-LM", "", INTRODUCTION, *flag_sections(), "", *own_flags()]
    lines += ["", "## Deviations", "", "Where a flag is taken and a number still differs.", "", *deviations]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({"docs/compat.md": page()}, sys.argv[1:]))
