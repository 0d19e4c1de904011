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
def test_ops_give_the_numbers_of_the_host(name: str):
    tensor, digester = TENSORS[name], Digester()
    rows = tensor.shape[0] if tensor.dim() else 1
    waiting = [
        digester.on_device(tensor_digest._bytes(tensor, 1)[0]),
        digester.rows_on_device(tensor_digest._padded(tensor_digest._bytes(tensor, rows))),
    ]
    here = [digester.whole(tensor), digester.by_row(tensor if tensor.dim() else tensor.view(1))]
    assert digester.numbers(waiting) == here


def test_digests_of_many_tensors_wait_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_digest, "_COLLECT_AT", 40)
    digester = Digester()
    tensors = [torch.randn(n, 5) for n in (1, 700, 3, 40, 5000, 2, 17)]
    for _ in range(2):
        waiting = []
        for tensor in tensors:
            waiting.append(digester.on_device(tensor_digest._bytes(tensor, 1)[0]))
            waiting.append(digester.rows_on_device(tensor_digest._padded(tensor_digest._bytes(tensor, len(tensor)))))
        here = [digest for tensor in tensors for digest in (digester.whole(tensor), digester.by_row(tensor))]
        assert digester.numbers(waiting) == here
