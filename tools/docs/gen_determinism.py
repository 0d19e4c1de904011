"""Write docs/determinism.md from the promises, the pinned variables and switches, and the refused settings.

python tools/docs/gen_determinism.py --write      after a promise, a variable or a switch was added or changed
python tools/docs/gen_determinism.py --check      exit 1 if the page is stale
"""

from __future__ import annotations

import sys

from generated import cell, table, write_or_check
from promises import LEVELS, PROMISES

from megatron.core.ops.outside_versions import KNOWN_PATHS
from megatron.training.setup.pinned_environment import PINS
from megatron.training.setup.pinned_switches import SWITCHES

INTRODUCTION = """\
Made by `tools/docs/gen_determinism.py`; do not edit.

`--deterministic-mode` makes the bits of a run a function of recipe, data, seed, logical layout, software versions and
device model, and of nothing else. It is resolved once, after parsing, before CUDA is touched or a package of kernels is
imported. What it cannot keep it refuses, naming setting, reason and alternative; it never changes a setting silently.
The ops that a run may take, with their guarantees, are in [op-catalog.md](op-catalog.md); flags of Megatron's that are
refused are in [compat.md](compat.md).

## The logical layout

The logical data-parallel size (`--logical-data-parallel-size`, default: that of the first launch), the block of the
gradient's fold (`--logical-reduce-block-size`, default: min(LDP, max(1, 8 // TP))), TP, EP, ETP, the padded vocabulary
and the micro-batch size. It is stored in the checkpoint and rules later launches. Free are: the number of data-parallel
ranks as far as it divides LDP (and TP * DP stays a multiple of ETP * EP), the pipeline's size and chunks, the
distributed optimizer, bucket sizes, and where ranks live.

With fewer data-parallel ranks than logical shards a rank works on several shards in turn, LDP / DP passes a step, in
one pipeline schedule. A pass ends in one ordered reduce-scatter per bucket; the fold goes on where the pass before
stopped. A rank keeps at most two more fp32 tensors of the size of its own part of the gradients for that (one where a
block is never open between passes, none with one pass). With as many ranks as shards nothing is added: no volume, no
memory.

## The order of a gradient's additions

1. micro-batches of a logical shard, ascending, in fp32, from +0.0;
2. logical shards: left to right inside blocks of B, then the blocks left to right; first terms are copied. Experts:
   logical expert groups `(v * TP + tp) // (ETP * EP)`, in blocks of max(1, B * TP // (ETP * EP));
3. tensor-parallel ranks, for copies whose gradients are partial;
4. first stage + last stage, for a parameter of both;
5. one multiplication by fp32(1 / LDP); then the clip; then the optimizer, element by element.

Across machines step 2 is made in two stages, inside blocks and then between them, where every block lies inside one
machine and B divides the data-parallel size; it is the same sum.
"""

OUTSIDE = """\
Paths of outside packages whose bits are known to differ between replays, or were not shown to repeat, and what is taken
in their place. A variant that calls a package is never taken unasked, and the package is imported by the run that asks
for one (`--op-variants ssd_scan=mamba_ssm_deterministic`), when its ops are chosen. A package's deterministic mode runs
with `--deterministic-mode` only, which pins the variables above before the import, and from the version on that it was
shown with; its default mode without it only, because torch's switch and those variables turn it off. Anything else is
refused at start. The manifest of a run holds the package's version.
"""

PROGRAMS = """\
## Programs of one's own

    from megatron.training.setup.determinism import enter_deterministic_mode
    enter_deterministic_mode()          # first thing, before CUDA and before packages of kernels

It does to a process what `--deterministic-mode` does, and returns the variables it set. Called too late it raises and
says what has started already and which variable that did not see; nothing is changed then.
"""


def page() -> str:
    """The page's text."""
    lines = ["# Determinism", "", INTRODUCTION, "## Promises", ""]
    lines += [f"* **{level}**: {text}." for level, text in LEVELS.items()]
    lines.append("")
    lines += table(
        ("level", "promise", "kept by", "test", "control that must fail"),
        [(p.level, cell(p.promise), cell(p.kept_by), f"`{p.test}`", f"`{p.control}`") for p in PROMISES],
    )
    lines += ["", "## Environment", ""]
    lines.append("A value that a launcher set and that is not accepted is refused, on the CPU too, and never replaced.")
    lines.append("`--determinism-allow-env NAME,...` takes it as it is and records it in the manifest.")
    lines.append("")
    lines += table(
        ("variable", "accepted", "set where unset", "read once by", "why"),
        [
            (f"`{p.name}`", cell(p.accepted), f"`{p.value}`" if p.value else "no", p.read_by or "-", cell(p.why))
            for p in PINS
        ],
    )
    lines += ["", "## Torch's switches", ""]
    lines += table(
        ("switch", "value", "why"),
        [(f"`torch.{s.write or s.read}`", f"`{s.value}`", cell(s.why)) for s in SWITCHES],
    )
    lines += ["", "## Outside packages", "", OUTSIDE]
    lines += table(
        ("package", "versions", "path", "why", "taken in its place", "evidence"),
        [tuple(map(cell, (p.package, p.versions, p.path, p.why, p.instead, p.evidence))) for p in KNOWN_PATHS],
    )
    return "\n".join([*lines, "", PROGRAMS]).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({"docs/determinism.md": page()}, sys.argv[1:]))
