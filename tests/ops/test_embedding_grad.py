"""Gradients of a table add in the order of positions, however often an id repeats."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.embedding_grad import deterministic_index_add, deterministic_rounds, reference

FAST = (deterministic_index_add.embedding_grad, deterministic_rounds.embedding_grad)


def _data(tokens: int, width: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(-2, vocabulary + 2, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = 3
    dy = torch.randn(tokens, width, generator=generator) * 10.0 ** torch.randint(
        -4, 4, (tokens, 1), generator=generator
    )
    return torch.randn(vocabulary, width, generator=generator), dy, ids


@pytest.mark.parametrize("fn", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thousands_of_repeats_add_one_after_the_other(fn, dtype):
    main_grad, dy, ids = _data(3000, 24, 40)
    want = main_grad.clone()
    reference.embedding_grad(want, dy.to(dtype), ids)
    fn(main_grad, dy.to(dtype), ids)
    assert same_bits(main_grad, want)


@pytest.mark.parametrize("fn", FAST)
def test_another_order_of_positions_gives_other_bits(fn):
    """Control: the data shows the order."""
    main_grad, dy, ids = _data(3000, 24, 40)
    backwards = main_grad.clone()
    fn(main_grad, dy, ids)
    fn(backwards, dy.flip(0), ids.flip(0))
    assert not same_bits(main_grad, backwards)


def test_a_strided_main_gradient_is_written_in_place():
    buffer = torch.zeros(5, 12)
    for fn in FAST:
        fn(buffer[:, 2:6], torch.ones(3, 4), torch.tensor([1, 1, 7]))
    assert buffer.sum() == 16.0
    assert buffer[1, 2:6].tolist() == [4.0] * 4
