"""Write docs/op-catalog.md and tests/golden/op_manifest.json from the ops that are registered.

    python tools/docs/gen_op_catalog.py --write      after an op or a variant was added or changed
    python tools/docs/gen_op_catalog.py --check      exit 1 if either file is stale

Both say of every variant what it promises on which device and why, and are the same on every machine. The hashes
of the sources are in the manifest of each run, not here.
"""

from __future__ import annotations

import json
import sys

from declared_ops import declared_ops
from generated import cell, table, write_or_check

from megatron.core.ops.registry import Op, Variant

INTRODUCTION = """\
Made by `tools/docs/gen_op_catalog.py` from the registered ops; do not edit.

A guarantee includes those before it:

* `NONE`: two runs may differ (atomics, a choice made by timing);
* `RUN_TO_RUN`: the same inputs on the same kind of device give the same bits;
* `BATCH`: the bits of a row do not depend on the other rows;
* `LAYOUT`: the bits do not depend on how the work is cut over ranks.

The variants of an op are listed in order of preference. A run in deterministic mode takes the first that
promises `RUN_TO_RUN` or more on its device, any other run the first that works there.
"""


def dtype_names(variant: Variant) -> list[str]:
    """Names of the activation types a variant takes, in alphabetical order."""
    return sorted(str(dtype).removeprefix("torch.") for dtype in variant.dtypes)


def described(variant: Variant) -> dict[str, object]:
    """One variant as the golden manifest has it."""
    return {
        "name": variant.name,
        "guarantee": {device: level.name for device, level in sorted(variant.guarantee.items())},
        "dtypes": dtype_names(variant),
        "sources": [variant.fn.__module__, *variant.sources],
        "why": variant.why,
    }


def section(op: Op) -> list[str]:
    """The lines about one op in the catalog."""
    tolerances = [
        (str(dtype).removeprefix("torch."), f"{t.rtol:g}", f"{t.atol:g}", cell(t.reason))
        for dtype, t in op.spec.tolerance.items()
    ]
    rows = [
        (
            f"`{v.name}`",
            ", ".join(f"{device} `{level.name}`" for device, level in sorted(v.guarantee.items())),
            ", ".join(dtype_names(v)),
            f"`{v.fn.__module__}`",
            cell(v.why),
        )
        for v in op.variants
    ]
    return [
        f"## {op.spec.name}",
        "",
        op.spec.promise,
        "",
        f"Order of additions: {op.spec.order}",
        "",
        *table(("variant", "promises", "types", "source", "why"), rows),
        "",
        *table(("type", "relative tolerance", "absolute", "reason"), tolerances),
        "",
    ]


def pages() -> dict[str, str]:
    """Path and text of both files."""
    ops = sorted(declared_ops(), key=lambda op: op.spec.name)
    lines = ["# Op catalog", "", INTRODUCTION]
    for op in ops:
        lines += section(op)
    manifest = {op.spec.name: [described(v) for v in op.variants] for op in ops}
    return {
        "docs/op-catalog.md": "\n".join(lines).rstrip() + "\n",
        "tests/golden/op_manifest.json": json.dumps(manifest, indent=2) + "\n",
    }


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
