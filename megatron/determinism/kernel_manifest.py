"""The committed manifest of kernel files: each with its tests and the digests of both, or exempt until a date.

A file holds a kernel if it compiles or launches one (Triton, CUDA) or calls an outside package of kernels. Faults are a
kernel that is not listed, one that changed while its tests did not, and an exemption that is over. ``record`` brings
the digests up to date and asks for a reason where only the kernel changed.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.core.ops.launch_table import TABLE_FILE, rows_declared_in, table_of

MANIFEST = "tests/golden/kernel_manifest.json"
LIBRARY = "megatron"
OPS = "megatron/core/ops"
LAUNCH_TABLE = f"{OPS}/{TABLE_FILE.name}"
KERNEL_PACKAGES = (
    "triton",
    "transformer_engine",
    "mamba_ssm",
    "causal_conv1d",
    "apex",
    "fused_weight_gradient_mlp_cuda",
    "cudnn",
    "flash_attn",
    "cutlass",
    "cupy",
    "numba",
    "torch.utils.cpp_extension",
    "megatron.core.ops.direct_launch",
)
KERNEL_SUFFIXES = (".cu", ".cuh", ".ptx", ".cpp", ".cc")
RECORD = "megatron-determinism kernels record"

Entry = dict[str, Any]


def kernel_files(root: Path) -> list[str]:
    """Paths of the library's kernel files, relative to the repository."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in (root / LIBRARY).rglob("*")
        if path.suffix in KERNEL_SUFFIXES or (path.suffix == ".py" and holds_kernel(path))
    )


def holds_kernel(path: Path) -> bool:
    """Whether a Python file compiles or launches a GPU kernel or calls an outside package of kernels."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(_compiles(decorator) for decorator in node.decorator_list):
            return True
        if any(name == p or name.startswith(p + ".") for name in _imported(node) for p in KERNEL_PACKAGES):
            return True
    return False


def _imported(node: ast.AST) -> list[str]:
    """Dotted names that a node imports, by a statement, ``import_module`` or ``__import__``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
    return []


def _compiles(decorator: ast.expr) -> bool:
    """Whether a decorator's last name is ``jit``, called or not."""
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name).rpartition(".")[2] == "jit"


def digest(root: Path, paths: list[str]) -> str:
    """SHA-256 over files, without empty lines and lines of comment, and over the rows of the launch table for kernels
    that they declare, 16 hex digits."""
    total = hashlib.sha256()
    table_file = root / LAUNCH_TABLE
    table = table_of(table_file.read_text("utf-8")) if table_file.is_file() else {}
    for path in paths:
        lines = (line.rstrip() for line in (root / path).read_text("utf-8").splitlines())
        code = [line for line in lines if line and not line.lstrip().startswith(("#", "//"))]
        text = "\n".join([path, *code, ""])
        total.update((text + rows_declared_in(text, table)).encode())
    return total.hexdigest()[:16]


def read(root: Path) -> dict[str, Entry]:
    """The committed manifest; empty where there is none.

    Raises:
        DamagedInputError: it is not JSON, or not of the form that ``record`` gives it.
    """
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if not isinstance(manifest, dict):
            raise ValueError("it is no object with an entry for each kernel file")
        for name, entry in manifest.items():
            tests = entry.get("tests", []) if isinstance(entry, dict) else None
            if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
                raise ValueError(f'the entry of {name} is no object with a list of files as "tests"')
    except ValueError as error:
        words = f"{MANIFEST} cannot be read: {error}; take it from a commit that passed, then record again"
        raise DamagedInputError(words) from error
    return manifest


def write(root: Path, manifest: Mapping[str, Entry]) -> None:
    """Write the manifest."""
    (root / MANIFEST).write_text(json.dumps(dict(sorted(manifest.items())), indent=2) + "\n", "utf-8")


def faults(root: Path, manifest: Mapping[str, Entry], today: datetime.date) -> list[str]:
    """What is wrong, one file a line."""
    files = kernel_files(root)
    found = [f"{path}: listed in {MANIFEST}, but no kernel any more: {RECORD}" for path in manifest.keys() - set(files)]
    for path in files:
        fault = f"a kernel that {MANIFEST} does not list: {RECORD}"
        if path in manifest:
            entry = manifest[path]
            fault = _exemption_fault(entry, today) if "exempt" in entry else _test_fault(root, path, entry)
        if fault:
            found.append(f"{path}: {fault}")
    return sorted(found)


def _exemption_fault(entry: Entry, today: datetime.date) -> str:
    try:
        expires = datetime.date.fromisoformat(str(entry["expires"]))
    except (KeyError, ValueError):
        return f'an exemption without a day as "expires": "YYYY-MM-DD" in {MANIFEST}'
    if not entry["exempt"]:
        return f'an exemption without a reason as "exempt" in {MANIFEST}'
    what_to_do = f'put "tests" in its place in {MANIFEST}, then {RECORD}; or a later day, if the reason still holds'
    return f"its exemption ended on {expires}: {entry['exempt']}; {what_to_do}" if expires < today else ""


def _test_fault(root: Path, path: str, entry: Entry) -> str:
    tests = entry.get("tests", [])
    missing = [test for test in tests if not (root / test).is_file()]
    if missing or not tests:
        return (
            f"its tests are not there: {', '.join(missing) or 'none is listed'}; name files that test it in {MANIFEST}"
        )
    changed = digest(root, [path]) != entry.get("kernel")
    tests_changed = digest(root, tests) != entry.get("tested")
    if changed and not tests_changed:
        words = f"change one, or {RECORD} --no-test-change REASON"
        return f"changed, but none of its tests ({', '.join(tests)}): {words}"
    what = "changed with its tests" if changed else "its tests changed"
    return f"{what}: {RECORD}" if changed or tests_changed else ""


def record(root: Path, manifest: Mapping[str, Entry], reason: str | None) -> tuple[dict[str, Entry], list[str]]:
    """The manifest with the digests of today, and the faults that it cannot mend: kernels that changed without their
    tests where no ``reason`` says why that is right, and kernels whose tests have to be named by hand."""
    fresh, refused = {}, []
    for path in kernel_files(root):
        entry = dict(manifest.get(path) or {"tests": _likely_tests(root, path)})
        fresh[path] = entry
        if "exempt" in entry:
            continue
        if not entry.get("tests") or not all((root / test).is_file() for test in entry["tests"]):
            refused.append(f"{path}: name files that test it under tests in {MANIFEST}")
            continue
        now = {"kernel": digest(root, [path]), "tested": digest(root, entry["tests"])}
        alone = "kernel" in entry and entry["kernel"] != now["kernel"] and entry.get("tested") == now["tested"]
        if alone and not reason:
            refused.append(f"{path}: {_test_fault(root, path, entry)}")
            continue
        if alone:
            now["no_test_change"] = str(reason)
        elif entry.get("kernel") != now["kernel"]:
            entry.pop("no_test_change", None)
        entry.update(now)
    return fresh, refused


def _likely_tests(root: Path, path: str) -> list[str]:
    """Tests of a kernel in the folder of an op: its cases, and the op's own tests where there are any."""
    op = path.removeprefix(OPS + "/").split("/")[0]
    named = [f"{OPS}/{op}/spec.py", f"tests/ops/test_{op}.py"]
    return [test for test in named if (root / test).is_file()] if path.startswith(f"{OPS}/{op}/") else []
