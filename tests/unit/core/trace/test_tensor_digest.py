"""Digests see every bit and every position, nothing but logical elements, and are the same on host and device."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.digest_words.definition import TILE
from megatron.core.trace.digest_queue import Digest
from megatron.core.trace.tensor_digest import Digester
from megatron.core.trace.tensor_words import readable, row_words
from tests.support.digests import texts

TENSORS = {
    "scalar": torch.tensor(1.5),
    "odd_bytes": torch.arange(7, dtype=torch.uint8),
    "bfloat16": torch.randn(5, 3).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.ones(3, dtype=torch.complex64),
    "strided": torch.randn(6, 4).t(),
    "int64": torch.arange(33),
}


def whole(digester: Digester, tensor: torch.Tensor) -> Digest:
    return digester.whole([tensor])[0]


@pytest.mark.parametrize("name", TENSORS)
def test_equal_values_have_equal_digests_and_one_bit_shows(name: str):
    tensor, digester = TENSORS[name], Digester()
    alike = digester.whole([tensor, tensor.clone(), tensor.contiguous()])
    assert alike[0] == alike[1] == alike[2]
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    assert whole(digester, changed) != alike[0]


def test_zero_and_minus_zero_and_order_differ():
    digester = Digester()
    assert whole(digester, torch.tensor([0.0])) != whole(digester, torch.tensor([-0.0]))
    assert whole(digester, torch.tensor([1.0, 2.0])) != whole(digester, torch.tensor([2.0, 1.0]))


def test_every_place_of_several_tiles_shows_in_both_lanes():
    digester, size = Digester(), 5 * TILE + 7
    marked = torch.eye(size, dtype=torch.uint8)[:: size // 200]
    found = digester.whole(list(marked.repeat_interleave(4, dim=1)))
    assert len({first for first, _ in found}) == len({second for _, second in found}) == len(marked)


def test_flipped_signs_show_however_many():
    digester, values = Digester(), torch.randn(6000)
    seen = set()
    for count in range(0, 6000, 30):
        values[:count].neg_()
        seen.add(tuple(whole(digester, values)))
    assert len(seen) == 200


def test_gaps_between_elements_are_not_read():
    storage = torch.zeros(4, 8)
    view, digester = storage[:, :3], Digester()
    before = whole(digester, view)
    storage[:, 3:] = float("nan")
    assert whole(digester, view) == before


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
    assert Digester().whole([torch.zeros(0, 3)]) == [[0, 0]]
    assert Digester().by_row(torch.zeros(0, 3)) == [0]


def by_op(digester: Digester, tensor: torch.Tensor) -> list[Digest]:
    """Both digests as a device's tensors get them."""
    words = row_words(tensor if tensor.dim() else tensor.view(1))
    return [*digester.on_device([readable(tensor)]), digester.rows_on_device(words)]


@pytest.mark.parametrize("name", TENSORS)
def test_ops_give_the_numbers_of_the_host(name: str):
    tensor, digester = TENSORS[name], Digester()
    here = [whole(digester, tensor), digester.by_row(tensor if tensor.dim() else tensor.view(1))]
    waiting = by_op(digester, tensor)
    assert texts(digester, waiting[:1], waiting[1:]) == texts(digester, here[:1], here[1:])


@pytest.mark.parametrize("capacity", [600, 1 << 16])
def test_digests_of_many_tensors_wait_together(capacity: int):
    digester = Digester(capacity=capacity)
    tensors = [torch.randn(n, 5) for n in (1, 700, 3, 40, 5000, 2, 17, 60_000)]
    here = [digest for tensor in tensors for digest in (whole(digester, tensor), digester.by_row(tensor))]
    for _ in range(2):
        waiting = [digest for tensor in tensors for digest in by_op(digester, tensor)]
        together = digester.on_device([readable(tensor) for tensor in tensors])
        adopted = digester.adopt(torch.tensor([[1, -2], [3, 4]]))
        found = texts(digester, [*waiting[::2], *together, *adopted], waiting[1::2])
        assert found == texts(digester, [*here[::2], *here[::2], [1, -2], [3, 4]], here[1::2])
