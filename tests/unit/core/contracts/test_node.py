"""A Node is torch's autograd function, without the search for functorch's wrappers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch._functorch import utils

from megatron.core.contracts.node import Node


class Doubled(Node):
    """2 x, and a gradient of 3, which is nobody else's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * times

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3.0 * x, None


class AsTorchHasIt(torch.autograd.Function):
    """The control: the same, derived from torch's own."""

    forward, backward = Doubled.forward, Doubled.backward


def test_it_is_applied_and_differentiated_as_torchs_and_searches_nothing() -> None:
    seen = {}
    for kind in (Doubled, AsTorchHasIt):
        x = torch.tensor([1.0, -2.0], requires_grad=True)
        with mock.patch.object(utils, "unwrap_dead_wrappers", wraps=utils.unwrap_dead_wrappers) as search:
            y = kind.apply(x, 2)
        y.sum().backward()
        assert (y.tolist(), x.grad.tolist()) == ([2.0, -4.0], [3.0, -6.0])
        assert y.grad_fn.name() == f"{kind.__name__}Backward"
        seen[kind] = search.call_count
    assert seen == {Doubled: 0, AsTorchHasIt: 1}
