"""Computing activations again in the backward pass instead of keeping them.

The second forward runs the same ops on the same inputs and weights, and noise is a function of logical coordinates, so
it gives the same bits; it counts and reports nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.ops.rerun import rerun

Layers = Callable[[torch.Tensor, Microbatch, StageReport], torch.Tensor]

_NO_HOOKS = contextlib.nullcontext()


class _Again(torch.autograd.Function):
    """``run(again, *inputs)`` without a graph, and once more with one when the gradient comes."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(False, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        grads: list[torch.Tensor | None] = [None] * len(inputs)
        for place, x in enumerate(inputs):
            if x.requires_grad:
                # Not ``x.grad``, which may have other strides, and reductions further on depend on them.
                x.register_hook(functools.partial(grads.__setitem__, place))
        with rerun() as again:
            with torch.enable_grad():
                out = ctx.run(True, *inputs)
            again.in_forward = False
            torch.autograd.backward((out,), (grad,))
        return None, *grads


def compute_again(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """``run(*inputs)``, keeping nothing but the inputs for the backward pass."""
    return _Again.apply(lambda again, *x: run(*x), *inputs)


def run_again(run: Layers, x: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
    """``run(x, microbatch, report)``, keeping nothing but ``x`` for the backward pass. Outside training it just runs.

    The second time ``run`` gets a micro-batch that is marked ``recomputing``, and a report that is thrown away.
    """
    if not microbatch.training:
        return run(x, microbatch, report)
    second = dataclasses.replace(microbatch, recomputing=True)

    def either(again: bool, x: torch.Tensor) -> torch.Tensor:
        return run(x, second, StageReport()) if again else run(x, microbatch, report)

    return _Again.apply(either, x)


def keeping(
    produce: Callable[..., torch.Tensor], value: torch.Tensor, *sources: torch.Tensor, wanted: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """A context in which autograd nodes that would save ``value`` (contiguous, the result of ``produce(*sources)``) for
    their backward save ``sources`` instead, and call ``produce`` again when they need it. Does nothing unless
    ``wanted``."""
    if not wanted:
        return _NO_HOOKS
    sources = tuple(source.detach() for source in sources)
    place, numel = value.data_ptr(), value.numel()

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Size]:
        same = tensor.data_ptr() == place and tensor.numel() == numel and tensor.dtype == value.dtype
        return (tensor.shape,) if same and tensor.is_contiguous() and numel else tensor

    def unpack(kept: torch.Tensor | tuple[torch.Size]) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        with rerun(), torch.no_grad():
            return produce(*sources).view(kept[0])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
