"""kernels list and check: the books are complete, and each kind of gap is seen."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from megatron.core.ops.catalog import ALL_OPS
from megatron.determinism import kernels
from megatron.determinism.kernels import OPS_FOLDER, check_kernels, list_kernels, main
from megatron.determinism.report import Exit, Outcome


def test_without_triton_nothing_is_said_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "installed", lambda package: False)
    outcome = check_kernels(ALL_OPS, OPS_FOLDER)
    assert outcome.exit == Exit.NOT_COMPARABLE
    assert "without Triton" in outcome.verdict


def test_books_are_complete():
    outcome = check_kernels(ALL_OPS, OPS_FOLDER)
    assert outcome.exit == Exit.SAME, outcome.details


def test_every_variant_is_listed():
    outcome = list_kernels(ALL_OPS)
    assert outcome.exit == Exit.SAME
    listed = {(op, v["variant"]) for op, variants in outcome.facts["ops"].items() for v in variants}
    assert listed == {(op.spec.name, v.name) for op in ALL_OPS for v in op.variants}


@pytest.mark.parametrize(
    "text",
    [
        "import triton\n\n@triton.jit\ndef k(x): ...\n",
        "from triton import jit\n",
        "import mamba_ssm.ops.triton\n",
        "@tl_jit.jit(noinline=True)\ndef k(x): ...\n",
    ],
)
def test_kernel_outside_the_books_is_seen(tmp_path: Path, text: str):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "deterministic_triton.py").write_text(text)
    (tmp_path / "planted" / "plain.py").write_text("import torch\n")
    outcome = check_kernels(ALL_OPS, tmp_path, "planted_package")
    assert outcome.exit == Exit.DIFFERENT
    assert len(outcome.details) == 1 and "planted/deterministic_triton.py: a kernel" in outcome.details[0]


def test_op_outside_the_catalog_is_seen(tmp_path: Path):
    (tmp_path / "forgotten").mkdir()
    (tmp_path / "forgotten" / "spec.py").write_text("")
    assert "forgotten: an op that the catalog does not list" in check_kernels(ALL_OPS, tmp_path).details[0]


def test_incomplete_op_is_seen(tmp_path: Path):
    op = ALL_OPS[0]
    reference = op.variants[-1]
    gaps = {
        "the last variant is not the reference": dataclasses.replace(op, variants=()),
        "does not say what fixes its order": dataclasses.replace(
            op, variants=(dataclasses.replace(reference, why=""),)
        ),
        "no case to test it with": dataclasses.replace(
            op, spec=dataclasses.replace(op.spec, cases=lambda generator, dtype, device: [])
        ),
        "no tolerance": dataclasses.replace(op, spec=dataclasses.replace(op.spec, tolerance={})),
        "does not say what it computes": dataclasses.replace(op, spec=dataclasses.replace(op.spec, order="")),
    }
    for words, broken in gaps.items():
        outcome = check_kernels([broken], tmp_path)
        assert outcome.exit == Exit.DIFFERENT
        assert any(words in detail for detail in outcome.details), words


def test_program(capsys: pytest.CaptureFixture[str]):
    assert main(["check"]) == 0
    assert capsys.readouterr().out.startswith(f"manifest complete: {len(ALL_OPS)} ops\n")
    with pytest.raises(SystemExit) as caught:
        main(["burn"])
    assert caught.value.code == 2


def test_a_reader_that_leaves_early_changes_no_exit_code() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        assert Outcome(exit=Exit.SAME, verdict="fine", details=("x" * 100_000,)).print(out, as_json=False) == 0
