"""Rows to experts and back: what arrives where, and in which order copies add."""

from __future__ import annotations

import torch

from megatron.core.ops.moe_permute import deterministic as permute
from megatron.core.ops.moe_permute import reference as permute_reference
from megatron.core.ops.moe_unpermute import deterministic as unpermute
from megatron.core.ops.moe_unpermute import reference as unpermute_reference

PAIRS = (
    (permute.moe_permute, unpermute.moe_unpermute),
    (permute_reference.moe_permute, unpermute_reference.moe_unpermute),
)


def test_rows_land_where_the_map_says():
    x_TH = torch.arange(6.0).view(3, 2)
    row_of_TJ = torch.tensor([[4, 0], [-1, 2], [1, -1]])
    for forth, back in PAIRS:
        rows_RH = forth(x_TH, row_of_TJ, 5)
        assert rows_RH.tolist() == [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [0.0, 0.0], [0.0, 1.0]]
        assert back(rows_RH, row_of_TJ).tolist() == [[0.0, 2.0], [2.0, 3.0], [4.0, 5.0]]


def test_copies_add_by_column_and_not_by_row():
    rows_RH = torch.tensor([[-1e8], [1.0], [1e8]])
    for _, back in PAIRS:
        assert back(rows_RH, torch.tensor([[2, 1, 0]])).item() == 0.0
        assert back(rows_RH, torch.tensor([[2, 0, 1]])).item() == 1.0


def test_gradients_of_copies_add_by_column():
    drows_RH = torch.tensor([[-1e8], [1.0], [1e8]])
    for forth, _ in PAIRS:
        for columns, want in (((2, 1, 0), 0.0), ((2, 0, 1), 1.0)):
            x_TH = torch.zeros(1, 1, requires_grad=True)
            forth(x_TH, torch.tensor([columns]), 3).backward(drows_RH)
            assert x_TH.grad.item() == want


def test_bf16_copies_add_in_fp32():
    rows_RH = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    for _, back in PAIRS:
        assert back(rows_RH, torch.tensor([[0, 1, 2]])).item() == 258.0


def test_absent_rows_do_not_leak_nan():
    rows_RH = torch.tensor([[float("nan")], [2.0]])
    for _, back in PAIRS:
        assert back(rows_RH, torch.tensor([[1, -1]])).item() == 2.0
