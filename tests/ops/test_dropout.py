"""Dropout is a function of key and global index."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops import philox
from megatron.core.ops.dropout import deterministic, reference
from megatron.core.ops.philox import box_index, keep_mask

KEY = (1, 2)
SHAPE = (24, 3, 10)
WHOLE = tuple((0, n) for n in SHAPE)


@pytest.mark.parametrize("fn", [reference.dropout, deterministic.dropout])
def test_any_box_sees_its_part_of_the_mask(fn):
    x = torch.randn(SHAPE)
    whole = fn(x, KEY, SHAPE, WHOLE, 0.3)
    box = ((5, 17), (1, 2), (4, 10))
    piece = tuple(slice(*b) for b in box)
    assert same_bits(fn(x[piece], KEY, SHAPE, box, 0.3), whole[piece].contiguous())
    keep = keep_mask(KEY, box_index(SHAPE, WHOLE, x.device), 0.3)
    assert torch.equal(whole != 0, keep)
    assert not torch.equal(fn(x, (1, 3), SHAPE, WHOLE, 0.3) != 0, keep)


def test_pieces_of_the_draw_do_not_show(monkeypatch):
    x = torch.randn(SHAPE)
    want = reference.dropout(x, KEY, SHAPE, WHOLE, 0.3)
    for size in (1, 60, 70):
        monkeypatch.setitem(philox._AT_ONCE, "cpu", size)
        assert same_bits(deterministic.dropout(x, KEY, SHAPE, WHOLE, 0.3), want)


def test_the_mean_is_kept():
    x = torch.ones(1000, 200)
    mean = reference.dropout(x, KEY, (1000, 200), ((0, 1000), (0, 200)), 0.1).mean()
    assert abs(mean - 1.0) < 3e-3


@pytest.mark.parametrize(("box", "p"), [(((0, 23), (0, 3), (0, 10)), 0.1), (WHOLE, 1.0), (WHOLE, -0.1)])
def test_arguments_that_do_not_fit_are_refused(box, p):
    for fn in (reference.dropout, deterministic.dropout):
        with pytest.raises(ValueError, match="dropout of"):
            fn(torch.zeros(SHAPE), KEY, SHAPE, box, p)
