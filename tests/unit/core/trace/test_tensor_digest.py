"""Digests see every bit and every position, nothing but logical elements, and are the same on host and device."""

from __future__ import annotations

import pytest
import torch

from megatron.core.trace import tensor_digest
from megatron.core.trace.tensor_digest import Digester

TENSORS = {
    "scalar": torch.tensor(1.5),
    "odd_bytes": torch.arange(7, dtype=torch.uint8),
    "bfloat16": torch.randn(5, 3).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.ones(3, dtype=torch.complex64),
    "strided": torch.randn(6, 4).t(),
    "int64": torch.arange(33),
}


@pytest.mark.parametrize("name", TENSORS)
def test_equal_values_have_equal_digests_and_one_bit_shows(name: str):
    tensor, digester = TENSORS[name], Digester()
    assert digester.whole(tensor) == digester.whole(tensor.clone()) == digester.whole(tensor.contiguous())
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    assert digester.whole(changed) != digester.whole(tensor)


def test_zero_and_minus_zero_and_order_differ():
    digester = Digester()
    assert digester.whole(torch.tensor([0.0])) != digester.whole(torch.tensor([-0.0]))
    assert digester.whole(torch.tensor([1.0, 2.0])) != digester.whole(torch.tensor([2.0, 1.0]))


def test_gaps_between_elements_are_not_read():
    storage = torch.zeros(4, 8)
    view, digester = storage[:, :3], Digester()
    before = digester.whole(view)
    storage[:, 3:] = float("nan")
    assert digester.whole(view) == before


def test_permuted_rows_keep_the_digest_without_order():
    rows, digester = torch.randn(40, 5), Digester()
    moved = rows[torch.randperm(40)]
    plain, permuted = digester.by_row(rows), digester.by_row(moved)
    assert plain[0] == permuted[0]
    assert plain[1:] != permuted[1:]
    assert len(plain) == 1 + 14, "40 rows in runs of 3"
    other = rows.clone()
    other[7, 2] += 1
    changed = digester.by_row(other)
    assert changed[0] != plain[0]
    assert [a == b for a, b in zip(plain[1:], changed[1:], strict=True)].index(False) == 7 // 3


def test_empty_tensors_have_a_digest():
    assert Digester().whole(torch.zeros(0, 3)) == [0, 0]
    assert Digester().by_row(torch.zeros(0, 3)) == [0]


@pytest.mark.parametrize("name", TENSORS)
def test_device_arithmetic_gives_the_host_numbers(name: str, monkeypatch: pytest.MonkeyPatch):
    # The torch branch runs on any device; here it is made to run on this one.
    tensor, digester = TENSORS[name], Digester()
    words = tensor_digest._words(tensor, 1)
    monkeypatch.setattr(tensor_digest, "_words", lambda t, rows: torch.from_numpy(words.copy()))
    expected = digester.whole(tensor)
    assert expected.tolist() == _host(tensor, monkeypatch)


def _host(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.undo()
    return Digester().whole(tensor)
