"""Ops of the CPU again in another process: the same bits. All of them on GPUs: tests/gpu/test_replays.py."""

from __future__ import annotations

from megatron.core.ops.launch import TABLE
from tests.ops.calls import interpreted
from tests.support.op_legs import differing, run_leg, seen_planted

OPS = ("causal_conv1d", "linear_grad", "moe_permute", "rms_norm", "ssd_scan")


def test_a_fresh_process_has_the_same_bits_and_what_is_planted_is_seen() -> None:
    plain, planted = run_leg("cpu", *OPS), run_leg("cpu", "planted", *OPS)
    assert plain["changing"] == []
    assert {name.partition("=")[0] for name in plain["digests"]} == set(OPS)
    assert seen_planted(plain, planted), (differing([plain, planted]), planted["changing"])
    assert not seen_planted(plain, plain)


def test_a_measured_row_of_the_launch_table_is_put_in_force_and_keeps_the_bits_of_the_rule() -> None:
    """Rows change no bits unless they have a key that is declared to."""
    rows = [key for key in TABLE if key[0] == "causal_conv1d_fwd"]
    assert rows
    lines = interpreted("""
import dataclasses
import torch
from megatron.core.digest.bits import sha256_of
from megatron.core.ops import launch
from megatron.core.ops.causal_conv1d import OP
from tests.ops.calls import call, seeded_cases
from tests.support.op_leg import rows_of

variant = OP.variant("deterministic_triton")
cases = {case.name: case for case in seeded_cases(OP.spec, torch.float32, torch.device("cpu"))}
forward = dataclasses.replace(cases["B2-S9-C33-W4"], grads=())
for words, table in rows_of(variant, launch.TABLE):
    launch.TABLE = launch.TABLE if table is None else table
    asked = launch.TABLE.get(("causal_conv1d_fwd", "", (64, 4)))
    print(bool(words), asked, *map(sha256_of, call(variant.fn, forward).tensors()), sep=" | ")
""")
    by_rule, *by_row = [line.split(" | ") for line in lines]
    assert by_rule[:2] == ["False", "None"] and len(by_rule[2]) == 64
    assert by_row == [["True", str(TABLE[key]), by_rule[2]] for key in rows]
