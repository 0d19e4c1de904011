"""Launch configurations: the table, the rules, and what hangs on both."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megatron.core.ops import launch, registry
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.launch import TABLE, Launch, power_of_two
from megatron.core.ops.launch_table import TABLE_FILE, rows_declared_in, table_of, text_of

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PLANTED = Launch(kernel="planted", rule=lambda width, _: {"BLOCK": width}, choices={"BLOCK": (8, 16)})


def declared() -> list[tuple[str, bool, Launch]]:
    """Op, whether its bits are the reference's, and launch of every kernel of the catalog."""
    pytest.importorskip("triton")
    return [
        (op.spec.name, op.spec.exact, value)
        for op in ALL_OPS
        for variant in op.variants
        for module in (variant.fn.__module__, *variant.sources)
        if module in sys.modules
        for value in vars(sys.modules[module]).values()
        if isinstance(value, Launch)
    ]


def test_a_row_serves_its_class_of_shapes_on_its_gpu(monkeypatch):
    monkeypatch.setattr(launch, "TABLE", {("planted", "", (64, 2)): {"BLOCK": 8}})
    assert PLANTED.config(CPU, 40, 2) == PLANTED.config(CPU, 64, 2) == {"BLOCK": 8}
    assert PLANTED.config(CPU, 32, 2) == {"BLOCK": 32}
    assert PLANTED.config(CPU, 65, 2) == {"BLOCK": 65}
    monkeypatch.setattr(launch, "gpu_name", lambda device: "another GPU")
    assert PLANTED.config(CPU, 40, 2) == {"BLOCK": 40}


def test_what_the_committed_table_says_is_remembered_and_another_table_is_asked(monkeypatch):
    monkeypatch.setattr(launch, "_KNOWN", {})
    known = PLANTED.config(CPU, 40, 2)
    assert PLANTED.config(CPU, 40, 2) is known
    assert PLANTED.config(CPU, 41, 2) == {"BLOCK": 41}
    other = dataclasses.replace(PLANTED, kernel="another")
    assert other.config(CPU, 40, 2) is not known
    monkeypatch.setattr(launch, "TABLE", {("planted", "", (64, 2)): {"BLOCK": 8}})
    assert PLANTED.config(CPU, 40, 2) == {"BLOCK": 8}
    launch.TABLE["planted", "", (64, 2)] = {"BLOCK": 16}
    assert PLANTED.config(CPU, 40, 2) == {"BLOCK": 16}
    monkeypatch.undo()
    assert PLANTED.config(CPU, 40, 2) == {"BLOCK": 40}


def test_sizes_that_are_new_in_every_step_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(launch, "_KNOWN", known := {})
    for width in range(3 * launch.MOST_KNOWN):
        assert PLANTED.config(CPU, width, 2) == {"BLOCK": width}
        assert len(known) <= launch.MOST_KNOWN


def test_the_committed_table_is_in_order_and_installed():
    assert TABLE_FILE.read_text("utf-8") == text_of(table_of(TABLE_FILE.read_text("utf-8")))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert TABLE_FILE.name in settings["tool"]["setuptools"]["package-data"]["megatron.core.ops"]


def test_every_row_is_of_a_kernel_and_has_the_keys_of_its_rule():
    known = {found.kernel: found for _, _, found in declared()}
    for kernel, gpu, shape in TABLE:
        assert gpu, "the CPU takes the rule"
        assert [power_of_two(size) for size in shape] == list(shape)
        assert set(TABLE[kernel, gpu, shape]) == set(known[kernel].rule(*shape))


def test_a_kernel_has_one_launch_and_an_exact_op_no_key_that_changes_bits():
    by_name: dict[str, Launch] = {}
    for op, exact, found in declared():
        assert by_name.setdefault(found.kernel, found) is found
        assert not (exact and found.new_bits), op
        assert found.new_bits <= set(found.choices)


def test_a_row_is_part_of_the_hash_of_the_variants_that_are_launched_by_it(monkeypatch):
    pytest.importorskip("triton")
    variants = {op.spec.name: op.variants[0] for op in ALL_OPS}
    before = {name: variants[name].source_hash() for name in ("rms_norm", "gated_rms_norm", "rope")}
    monkeypatch.setattr(registry, "TABLE", {**TABLE, ("column_sum", "another GPU", (64,)): {"BLOCK_R": 1}})
    after = {name: variants[name].source_hash() for name in before}
    assert {name for name in before if before[name] != after[name]} == {"rms_norm", "gated_rms_norm"}


def test_rows_belong_to_the_code_that_declares_their_kernel():
    table = {("rope", "H200", (1,)): {"HEADS": 1}, ("dropout", "H200", (1,)): {"BLOCK": 1}}
    assert table_of(rows_declared_in('LAUNCH = Launch(kernel="rope", rule=f)', table)) == {
        ("rope", "H200", (1,)): {"HEADS": 1}
    }
    assert rows_declared_in('SPEC = OpSpec(name="rope")', table) == ""
