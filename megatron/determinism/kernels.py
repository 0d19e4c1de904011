"""``kernels list`` and ``kernels check``: which implementation of each op exists, and whether any is outside the books.

A program of its own, ``python -m megatron.determinism.kernels``: the ops need torch, comparing runs does not.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Op
from megatron.determinism.report import Exit, Outcome

OPS_FOLDER = Path(__file__).resolve().parents[1] / "core" / "ops"
OPS_PACKAGE = "megatron.core.ops"
KERNEL_PACKAGES = frozenset(
    {"triton", "transformer_engine", "mamba_ssm", "causal_conv1d", "apex", "cudnn", "flash_attn"}
)


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


def check_kernels(ops: Iterable[Op], folder: Path, package: str = OPS_PACKAGE) -> Outcome:
    """Whether every op has a specification, cases to test it with and a reference, and every file with a kernel under
    ``folder`` belongs to a variant whose source hash covers it."""
    ops = list(ops)
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
        if module not in hashed and _holds_kernel(path):
            faults.append(f"{path}: a kernel of no registered variant, so it is neither tested nor hashed")
    if faults:
        return Outcome(
            exit=Exit.DIFFERENT,
            verdict=f"{len(faults)} fault{'s' * (len(faults) != 1)} in the manifest of ops",
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


def _holds_kernel(path: Path) -> bool:
    """Whether a file compiles a GPU kernel or calls an outside package of kernels."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import) and any(_root(alias.name) in KERNEL_PACKAGES for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and _root(node.module or "") in KERNEL_PACKAGES:
            return True
        if isinstance(node, ast.FunctionDef) and any(_compiles(decorator) for decorator in node.decorator_list):
            return True
    return False


def _compiles(decorator: ast.expr) -> bool:
    """Whether a decorator's last name is ``jit``, called or not."""
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name).rpartition(".")[2] == "jit"


def _root(module: str) -> str:
    return module.partition(".")[0]


def main(argv: Sequence[str]) -> int:
    """Run ``kernels list`` or ``kernels check``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megatron-determinism kernels", allow_abbrev=False)
    parser.add_argument("action", choices=("list", "check"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    outcome = list_kernels(ALL_OPS) if options.action == "list" else check_kernels(ALL_OPS, OPS_FOLDER)
    return outcome.print(sys.stdout, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
