"""A guard at run time: floating-point sums handed to a backend are refused, whoever asks for them.

The gate on our own sources sees ours; this one also sees a model of the user's (``--spec``) and outside packages.
It stands where every Python caller of torch.distributed ends up, the process group's own methods, so a function that
was imported before is caught too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
)
# The same bits in any order and grouping: minimum, maximum, and integers.
_FREE_OF_ORDER = (ReduceOp.MIN, ReduceOp.MAX)


class FloatSumRefusedError(RuntimeError):
    """A floating-point sum over ranks whose order nobody states."""


def refuse_float_sums() -> Callable[[], None]:
    """Make every process group of this process refuse floating-point reductions other than minimum and maximum.

    Returns what takes the guard away again. Calling it twice guards once.
    """
    # The class's own entries: what getattr returns would not bind to an instance when it is put back.
    entries = {name: entry for name, entry in vars(ProcessGroup).items() if name in _METHODS}
    for name, entry in list(entries.items()):
        if hasattr(entry, "refuses_float_sums"):
            del entries[name]
        else:
            setattr(ProcessGroup, name, _guarded(name, getattr(ProcessGroup, name)))

    def remove() -> None:
        for name, entry in entries.items():
            setattr(ProcessGroup, name, entry)

    return remove


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        inexact = any(t.is_floating_point() or t.is_complex() for t in _tensors(given))
        if inexact and _operation(given) not in _FREE_OF_ORDER:
            raise FloatSumRefusedError(
                f"ProcessGroup.{name} would add floating-point numbers of {dist.get_world_size(group)} ranks in an "
                "order of its own; --deterministic-mode adds them with megatron.core.process_groups.ordered_reduce "
                "(integers, minimum and maximum are free)"
            )
        return method(group, *args, **kwargs)

    call.refuses_float_sums = True  # type: ignore[attr-defined]
    return call


def _operation(given: Iterable[object]) -> ReduceOp.RedOpType:
    """What a call reduces by: in its options, or an argument of its own; a sum where it does not say."""
    for value in given:
        op = getattr(value, "reduceOp", value)
        if isinstance(op, ReduceOp):
            return op.op if hasattr(op, "op") else op
        if isinstance(op, ReduceOp.RedOpType):
            return op
    return ReduceOp.SUM


def _tensors(given: Iterable[object]) -> Iterable[torch.Tensor]:
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
