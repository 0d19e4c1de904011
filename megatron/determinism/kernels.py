"""``kernels list``, ``check`` and ``record``: which implementation of each op exists, and whether any is outside the
books.

A program of its own, ``python -m megatron.determinism.kernels``: the ops need torch, comparing runs does not.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.ops.availability import installed
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Op
from megatron.determinism import kernel_manifest
from megatron.determinism.command_line import build_parser
from megatron.determinism.report import Exit, Outcome

ROOT = Path(__file__).resolve().parents[2]
OPS_FOLDER = ROOT / "megatron" / "core" / "ops"
OPS_PACKAGE = "megatron.core.ops"
NAME_IT = "name its module in the sources of the variant that launches it"


def list_kernels(ops: Iterable[Op]) -> Outcome:
    """All variants of all ops, in order of preference, with what each promises and why."""
    lines, facts = [], {}
    for op in sorted(ops, key=lambda op: op.spec.name):
        lines.append(f"{op.spec.name}: {op.spec.promise}")
        facts[op.spec.name] = [
            {
                "variant": v.name,
                "guarantee": {device: level.name for device, level in sorted(v.guarantee.items())},
                "source": v.source_hash(),
                "why": v.why,
            }
            for v in op.variants
        ]
        for v in op.variants:
            promises = ", ".join(f"{device} {level.name}" for device, level in sorted(v.guarantee.items()))
            lines.append(f"  {v.name:<24} {promises:<32} {v.why}")
    return Outcome(
        exit=Exit.SAME,
        verdict=f"{len(facts)} ops, {sum(map(len, facts.values()))} variants",
        details=tuple(lines),
        facts={"ops": facts},
    )


def check_kernels(ops: Iterable[Op], folder: Path, package: str = OPS_PACKAGE, further: Iterable[str] = ()) -> Outcome:
    """Whether every op has a specification, cases to test it with and a reference, and every file with a kernel under
    ``folder`` belongs to a variant whose source hash covers it. ``further`` faults are reported with those found."""
    ops = list(ops)
    if not installed("triton"):
        return Outcome(
            exit=Exit.NOT_COMPARABLE,
            verdict="kernels cannot be checked without Triton, which they need to be registered: pip install triton",
        )
    faults = [fault for op in ops for fault in _op_faults(op)]
    listed = {op.spec.name for op in ops}
    faults += [
        f"{spec.parent}: an op that the catalog does not list"
        for spec in sorted(folder.glob("*/spec.py"))
        if spec.parent.name not in listed
    ]
    hashed = {module for op in ops for v in op.variants for module in (v.fn.__module__, *v.sources)}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
        if module not in hashed and kernel_manifest.holds_kernel(path):
            faults.append(f"{path}: a kernel of no registered variant, so it is neither tested nor hashed: {NAME_IT}")
    faults += further
    if faults:
        return Outcome(
            exit=Exit.DIFFERENT,
            verdict=f"{len(faults)} fault{'s' * (len(faults) != 1)} in the manifest",
            details=tuple(f"  {fault}" for fault in faults),
            facts={"faults": faults},
        )
    return Outcome(exit=Exit.SAME, verdict=f"manifest complete: {len(ops)} ops", facts={"ops": sorted(listed)})


def _op_faults(op: Op) -> list[str]:
    name = op.spec.name
    faults = []
    if not op.spec.promise or not op.spec.order:
        faults.append(f"{name}: the specification does not say what it computes and in which order it adds")
    if not op.variants or op.variants[-1].name != "reference":
        faults.append(f"{name}: the last variant is not the reference")
    faults += [f"{name}/{v.name}: does not say what fixes its order" for v in op.variants if not v.why]
    generator = torch.Generator().manual_seed(1)
    for dtype in op.spec.tolerance:
        if not op.spec.cases(generator, dtype, torch.device("cpu")):
            faults.append(f"{name}: no case to test it with in {dtype}")
    if not op.spec.tolerance:
        faults.append(f"{name}: no tolerance, so it is not tested against its reference")
    return faults


def record_kernels(root: Path, reason: str | None) -> Outcome:
    """Bring the manifest of kernels up to date, except where a kernel changed without its tests and no reason says
    why."""
    manifest, refused = kernel_manifest.record(root, kernel_manifest.read(root), reason)
    kernel_manifest.write(root, manifest)
    return Outcome(
        exit=Exit.DIFFERENT if refused else Exit.SAME,
        verdict=f"{kernel_manifest.MANIFEST}: {len(manifest)} kernel files, {len(refused)} not brought up to date",
        details=tuple(f"  {fault}" for fault in refused),
        facts={"faults": refused},
    )


def main(argv: Sequence[str]) -> int:
    """Run ``kernels list``, ``check`` or ``record``; returns the exit code."""
    options = build_parser().parse_args(["kernels", *argv])
    try:
        if options.action == "list":
            outcome = list_kernels(ALL_OPS)
        elif options.action == "check":
            listed = kernel_manifest.faults(ROOT, kernel_manifest.read(ROOT), datetime.date.today())
            outcome = check_kernels(ALL_OPS, OPS_FOLDER, further=listed)
        else:
            outcome = record_kernels(ROOT, options.no_test_change)
    except DamagedInputError as error:
        outcome = Outcome(exit=Exit.NOT_COMPARABLE, verdict=str(error))
    return outcome.print(sys.stdout, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
