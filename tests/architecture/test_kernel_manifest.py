"""Every kernel belongs to a registered variant, so that the catalog, the conformance tests and the hashes see it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Op
from tests.architecture.boundaries import KERNEL_PACKAGES
from tests.architecture.limits import is_kernel
from tests.architecture.sources import Source, files_with, parse


def imported_modules(source: Source) -> set[str]:
    """Dotted names the import statements of a file may load, late and conditional ones too."""
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def has_kernel(source: Source) -> bool:
    """Whether a file compiles a kernel or uses an outside kernel package."""
    compiled = any(isinstance(node, ast.FunctionDef) and is_kernel(node) for node in ast.walk(source.tree))
    outside = {name.partition(".")[0] for name in imported_modules(source)} & KERNEL_PACKAGES
    return compiled or bool(outside)


def variant_modules(ops: Iterable[Op], files: Mapping[str, Source]) -> set[str]:
    """Modules that implement a registered variant: its own, those it names as sources, and what these import."""
    todo = [m for op in ops for v in op.variants for m in (v.fn.__module__, *v.sources)]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        if module not in seen and module in files:
            seen.add(module)
            todo.extend(imported_modules(files[module]))
    return seen


def unregistered_kernels(ops: Iterable[Op], sources: Iterable[Source]) -> list[str]:
    """Paths of kernel files that no variant leads to."""
    files = {source.module: source for source in sources if source.path.startswith("megatron/core/ops/")}
    known = variant_modules(ops, files)
    return [source.path for module, source in files.items() if has_kernel(source) and module not in known]


def unhashed_kernels(ops: Iterable[Op], sources: Iterable[Source]) -> list[str]:
    """Paths of kernel files that a variant uses but whose text its hash leaves out."""
    files = {source.module: source for source in sources if source.path.startswith("megatron/core/ops/")}
    ops = list(ops)
    hashed = {m for op in ops for v in op.variants for m in (v.fn.__module__, *v.sources)}
    used = variant_modules(ops, files) - hashed
    return [files[module].path for module in sorted(used) if has_kernel(files[module])]


def test_every_kernel_belongs_to_a_variant() -> None:
    assert not unregistered_kernels(ALL_OPS, files_with(".py"))


def test_every_kernel_is_in_the_hash_of_its_variant() -> None:
    assert not unhashed_kernels(ALL_OPS, files_with(".py"))


def test_every_op_folder_is_in_the_catalog() -> None:
    folders = {s.path.split("/")[3] for s in files_with("spec.py") if s.path.startswith("megatron/core/ops/")}
    assert folders == {op.spec.name for op in ALL_OPS}


def test_every_op_has_a_specification_and_a_reference_as_its_last_variant() -> None:
    paths = {source.path for source in files_with(".py")}
    for op in ALL_OPS:
        assert op.variants[-1].name == "reference"
        folder = op.variants[-1].fn.__module__.rpartition(".")[0].replace(".", "/")
        assert {f"{folder}/spec.py", f"{folder}/reference.py"} <= paths


def test_planted_kernels_are_seen() -> None:
    planted = [
        parse("megatron/core/ops/planted/deterministic_triton.py", "@triton.jit\ndef k(x): ...\n"),
        parse("megatron/core/ops/planted/fast.py", "from mamba_ssm.ops import triton\n"),
        parse("megatron/core/ops/planted/reference.py", "import torch\n"),
    ]
    assert unregistered_kernels(ALL_OPS, planted) == [planted[0].path, planted[1].path]


def test_kernel_left_out_of_the_hash_is_seen() -> None:
    module = ALL_OPS[0].variants[-1].fn.__module__
    planted = [
        parse(module.replace(".", "/") + ".py", "from megatron.core.ops.planted import kernels\n"),
        parse("megatron/core/ops/planted/kernels.py", "@triton.jit\ndef k(x): ...\n"),
    ]
    assert unregistered_kernels(ALL_OPS, planted) == []
    assert unhashed_kernels(ALL_OPS, planted) == ["megatron/core/ops/planted/kernels.py"]
