"""The manifest of kernels: what is no fault, and each kind of fault planted."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from megatron.determinism import kernels
from megatron.determinism.kernel_manifest import LAUNCH_TABLE, MANIFEST, faults, kernel_files, read, record, write
from megatron.determinism.kernels import record_kernels
from megatron.determinism.report import Exit

TODAY = datetime.date(2026, 8, 1)
KERNEL = "megatron/core/ops/planted/kernels/planted.py"
SPEC = "megatron/core/ops/planted/spec.py"
TEST = "tests/ops/test_planted.py"
TEXT = "import triton\n\n\n@triton.jit\ndef planted_kernel(x):\n    return x\n"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one kernel, recorded."""
    for path, text in {KERNEL: TEXT, SPEC: "CASES = 1\n", TEST: "def test(): ...\n", MANIFEST: "{}"}.items():
        put(tmp_path, path, text)
    assert record_kernels(tmp_path, None).exit == Exit.SAME
    return tmp_path


def found(root: Path) -> list[str]:
    return faults(root, read(root), TODAY)


def test_recorded_kernel_is_no_fault(root: Path):
    assert read(root)[KERNEL]["tests"] == [SPEC, TEST]
    assert found(root) == []
    put(root, KERNEL, "# a comment\n\n" + TEXT)
    assert found(root) == []


def test_row_of_the_launch_table_is_part_of_the_kernel_that_it_launches(root: Path):
    put(root, KERNEL, TEXT + '\nLAUNCH = Launch(kernel="planted", rule=rule)\n')
    assert record_kernels(root, "it has a table now").exit == Exit.SAME
    row = '{"kernel": "%s", "gpu": "H200", "shape_class": [64], "config": {"BLOCK": 8}}'
    put(root, LAUNCH_TABLE, f"[{row % 'another'}]")
    assert found(root) == []
    put(root, LAUNCH_TABLE, f"[{row % 'planted'}]")
    assert "changed, but none of its tests" in found(root)[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megatron/core/ops/other/fast.py", "import mamba_ssm.ops.triton\n"),
        ("megatron/core/ops/other/fast.py", "from transformer_engine.pytorch import attention\n"),
        ("megatron/core/ops/other/fast.py", "import importlib\nconv = importlib.import_module('causal_conv1d')\n"),
        ("megatron/core/ops/other/fast.py", "scan = __import__('mamba_ssm').scan\n"),
        ("megatron/core/ops/other/fast.py", "from torch.utils.cpp_extension import load_inline\n"),
        ("megatron/core/optimizer/fast.py", "@tl_jit.jit(noinline=True)\ndef k(x): ...\n"),
        ("megatron/core/ops/other/fast.cu", "__global__ void k() {}\n"),
    ],
)
def test_kernel_that_is_not_listed(root: Path, path: str, text: str):
    put(root, path, text)
    put(root, "megatron/core/ops/other/reference.py", "import torch\n")
    assert kernel_files(root) == sorted([KERNEL, path])
    (fault,) = found(root)
    assert fault.startswith(f"{path}: a kernel that {MANIFEST} does not list")


def test_kernel_that_changed_without_its_tests(root: Path):
    put(root, KERNEL, TEXT.replace("return x", "return x + 1"))
    (fault,) = found(root)
    assert fault.startswith(f"{KERNEL}: changed, but none of its tests ({SPEC}, {TEST})")
    assert record_kernels(root, None).exit == Exit.DIFFERENT
    assert found(root) == [fault]
    assert record_kernels(root, "same sums, fewer registers").exit == Exit.SAME
    assert read(root)[KERNEL]["no_test_change"] == "same sums, fewer registers"
    assert found(root) == []
    put(root, KERNEL, TEXT.replace("return x", "return x + 2"))
    assert "none of its tests" in found(root)[0]


def test_kernel_that_changed_with_its_tests_is_recorded(root: Path):
    put(root, KERNEL, TEXT.replace("return x", "return x + 1"))
    record_kernels(root, "a reason")
    put(root, KERNEL, TEXT.replace("return x", "return x + 2"))
    put(root, TEST, "def test(): assert 1\n")
    assert "changed with its tests" in found(root)[0]
    assert record_kernels(root, None).exit == Exit.SAME
    assert found(root) == []
    assert "no_test_change" not in read(root)[KERNEL]


def test_tests_changed_earlier_do_not_count(root: Path):
    put(root, TEST, "def test(): assert 1\n")
    assert "its tests changed" in found(root)[0]
    record_kernels(root, None)
    put(root, KERNEL, TEXT.replace("return x", "return x + 1"))
    assert "none of its tests" in found(root)[0]


@pytest.mark.parametrize("tests", [[], ["tests/ops/test_gone.py"]])
def test_kernel_without_tests(root: Path, tests: list[str]):
    manifest = read(root)
    manifest[KERNEL]["tests"] = tests
    write(root, manifest)
    assert "its tests are not there" in found(root)[0]
    assert len(record(root, manifest, "a reason")[1]) == 1


def test_entry_that_lacks_everything(root: Path):
    write(root, {KERNEL: {}})
    assert f"none is listed; name files that test it in {MANIFEST}" in found(root)[0]
    assert record_kernels(root, None).exit == Exit.SAME
    assert found(root) == []
    write(root, {KERNEL: {"kernel": "of another day", "tests": [TEST]}})
    assert record_kernels(root, None).exit == Exit.SAME


@pytest.mark.parametrize(
    "text",
    ["<<<<<<< mine\n{}\n", "[1]", "7", "9" * 5000, '{"a": 1}', '{"a": {"tests": "b"}}', '{"a": {"tests": [1]}}'],
)
def test_manifest_of_another_form_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch, capsys, text: str):
    put(root, MANIFEST, text)
    monkeypatch.setattr(kernels, "ROOT", root)
    assert [kernels.main([action]) for action in ("check", "record")] == [Exit.NOT_COMPARABLE] * 2
    said = capsys.readouterr().out
    assert said.count(f"{MANIFEST} cannot be read: ") == said.count("\n") == 2


def test_kernel_whose_tests_have_to_be_named(root: Path):
    put(root, "megatron/core/ops/shared.py", TEXT)
    _, refused = record(root, read(root), None)
    assert refused == [f"megatron/core/ops/shared.py: name files that test it under tests in {MANIFEST}"]


@pytest.mark.parametrize(
    ("exemption", "fault"),
    [
        ({"exempt": "waits for a machine", "expires": "2026-08-01"}, ""),
        ({"exempt": "waits for a machine", "expires": "2026-07-31"}, "its exemption ended on 2026-07-31: waits for a"),
        ({"exempt": "waits for a machine", "expires": "2026-07-31"}, 'put "tests" in its place in'),
        ({"exempt": "", "expires": "2027-01-01"}, "an exemption without a reason"),
        ({"exempt": "waits for a machine"}, "an exemption without a day"),
        ({"exempt": "waits for a machine", "expires": "soon"}, "an exemption without a day"),
    ],
)
def test_exemptions(root: Path, exemption: dict[str, str], fault: str):
    write(root, {KERNEL: exemption})
    assert record(root, read(root), None) == ({KERNEL: exemption}, [])
    assert len(found(root)) == bool(fault)
    assert not fault or fault in found(root)[0]


def test_kernel_that_is_gone(root: Path):
    (root / KERNEL).unlink()
    assert "no kernel any more" in found(root)[0]
    record_kernels(root, None)
    assert read(root) == {}
