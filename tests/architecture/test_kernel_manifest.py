"""Every kernel belongs to a declared variant, so that the catalog, the conformance tests and the hashes see it.

The variants are read from the golden manifest: it holds those of packages that are not installed here as well, and
test_golden_lists.py keeps it fresh.
"""

from __future__ import annotations

import ast
import datetime
import json
from collections.abc import Iterable, Mapping

import pytest

from megatron.determinism.kernel_manifest import faults, read
from tests.architecture.boundaries import KERNEL_PACKAGES
from tests.architecture.limits import is_kernel
from tests.architecture.sources import ROOT, Source, files_with, parse


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


def declared_sources() -> dict[str, dict[str, list[str]]]:
    """By op and variant: the modules whose text is hashed for it."""
    manifest = json.loads((ROOT / "tests/golden/op_manifest.json").read_text("utf-8"))
    return {op: {v["name"]: v["sources"] for v in variants} for op, variants in manifest.items()}


def op_files(sources: Iterable[Source]) -> dict[str, Source]:
    """The files of ``megatron/core/ops`` by module."""
    return {source.module: source for source in sources if source.path.startswith("megatron/core/ops/")}


def used_modules(hashed: Iterable[str], files: Mapping[str, Source]) -> set[str]:
    """Modules of ops that the given ones import, directly or not, and themselves."""
    todo, seen = list(hashed), set()
    while todo:
        module = todo.pop()
        if module not in seen and module in files:
            seen.add(module)
            todo.extend(imported_modules(files[module]))
    return seen


def unregistered_kernels(hashed: Iterable[str], sources: Iterable[Source]) -> list[str]:
    """Paths of kernel files that no variant leads to."""
    files = op_files(sources)
    known = used_modules(hashed, files)
    return [source.path for module, source in files.items() if has_kernel(source) and module not in known]


def unhashed_kernels(variants: Mapping[str, list[str]], sources: Iterable[Source]) -> list[str]:
    """``variant: path`` of kernel files that a variant uses but whose text its hash leaves out."""
    files = op_files(sources)
    return [
        f"{name}: {files[module].path}"
        for name, hashed in variants.items()
        for module in sorted(used_modules(hashed, files) - set(hashed))
        if has_kernel(files[module])
    ]


def test_every_kernel_file_is_listed_with_tests_that_changed_when_it_did() -> None:
    """Each kind of fault is planted in tests/unit/determinism/test_kernel_manifest.py."""
    found = faults(ROOT, read(ROOT), datetime.date.today())
    assert not found, "\n".join(found)


def test_every_kernel_belongs_to_a_variant() -> None:
    hashed = [m for variants in declared_sources().values() for sources in variants.values() for m in sources]
    missing = unregistered_kernels(hashed, files_with(".py"))
    assert not missing, missing


@pytest.mark.parametrize("op", sorted(declared_sources()))
def test_every_kernel_is_in_the_hash_of_its_variant(op: str) -> None:
    missing = unhashed_kernels(declared_sources()[op], files_with(".py"))
    assert not missing, missing


def test_every_op_folder_is_in_the_catalog() -> None:
    folders = {s.path.split("/")[3] for s in files_with("spec.py") if s.path.startswith("megatron/core/ops/")}
    assert folders == set(declared_sources())


@pytest.mark.parametrize("op", sorted(declared_sources()))
def test_every_op_has_a_specification_and_a_reference_as_its_last_variant(op: str) -> None:
    name, sources = list(declared_sources()[op].items())[-1]
    assert name == "reference"
    assert sources[0] == f"megatron.core.ops.{op}.reference"
    assert (ROOT / "megatron/core/ops" / op / "spec.py").exists()


def test_planted_kernels_are_seen() -> None:
    planted = [
        parse("megatron/core/ops/planted/deterministic_triton.py", "@triton.jit\ndef k(x): ...\n"),
        parse("megatron/core/ops/planted/fast.py", "from mamba_ssm.ops import triton\n"),
        parse("megatron/core/ops/planted/reference.py", "import torch\n"),
    ]
    hashed = [planted[2].module]
    assert unregistered_kernels(hashed, planted) == [planted[0].path, planted[1].path]


def test_kernel_left_out_of_the_hash_is_seen() -> None:
    planted = [
        parse("megatron/core/ops/planted/deterministic.py", "from megatron.core.ops.planted import kernels\n"),
        parse("megatron/core/ops/planted/kernels.py", "@triton.jit\ndef k(x): ...\n"),
    ]
    variant, kernels = (source.module for source in planted)
    assert unregistered_kernels([variant], planted) == []
    assert unhashed_kernels({"v": [variant]}, planted) == ["v: megatron/core/ops/planted/kernels.py"]
    assert unhashed_kernels({"v": [variant, kernels]}, planted) == []
