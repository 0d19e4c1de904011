"""A guard at run time: floating-point sums handed to a backend are refused, whoever asks for them.

The gate on our own sources sees ours; this one also sees those of outside packages and of code around this package.
It stands in two places, so that a function that was imported before is caught too: at the process group's own methods,
where every Python caller of ``torch.distributed`` ends up, and in torch's dispatcher before the functional collectives,
which go on to the backend in C++ (DTensor and compiled code call those). ``stated_order`` is how ``ordered_reduce``
passes with a sum that has one order only. What it does not see is a caller in C++ that holds a process group: the
reducer of ``DistributedDataParallel``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
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
_FUNCTIONAL = "_c10d_functional"
# The same bits in any order and grouping: minimum, maximum, and integers.
_FREE_OF_ORDER = (ReduceOp.MIN, ReduceOp.MAX)


class _StatedOrder(threading.local):
    """Entered by whoever knows that a sum has one order only; on this thread the guard lets it pass."""

    entered = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self.entered = False


stated_order = _StatedOrder()


class FloatSumRefusedError(RuntimeError):
    """A floating-point sum over ranks whose order nobody states."""


def refuse_float_sums() -> Callable[[], None]:
    """Make this process refuse floating-point reductions over ranks other than minimum and maximum.

    Returns what takes the guard away again. Calling it twice guards once.
    """
    # The class's own entries: what getattr returns would not bind to an instance when it is put back.
    entries = {
        name: entry
        for name, entry in vars(ProcessGroup).items()
        if name in _METHODS and not hasattr(entry, "refuses_float_sums")
    }
    if not entries:
        return lambda: None
    functional = _guard_functional()
    for name in entries:
        setattr(ProcessGroup, name, _guarded(name, getattr(ProcessGroup, name), functional))

    def remove() -> None:
        for name, entry in entries.items():
            setattr(ProcessGroup, name, entry)
        functional._destroy()

    return remove


def _guarded(name: str, method: Callable[..., Any], functional: torch.library.Library) -> Callable[..., Any]:
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not stated_order.entered:
            given = [*args, *kwargs.values()]
            if _operation(given) not in _FREE_OF_ORDER:
                _require_exact(f"ProcessGroup.{name}", given)
        return method(group, *args, **kwargs)

    # The registration in the dispatcher lives as long as somebody holds it.
    call.refuses_float_sums = functional  # type: ignore[attr-defined]
    return call


def _guard_functional() -> torch.library.Library:
    """Stand before the functional reductions of every device: right above the kernels of the backends."""
    library = torch.library.Library(_FUNCTIONAL, "IMPL")
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, full_name = qualified.partition("::")
        if namespace == _FUNCTIONAL and "reduce" in full_name:
            name, _, overload = full_name.partition(".")
            op = getattr(getattr(getattr(torch.ops, _FUNCTIONAL), name), overload or "default")
            library.impl(full_name, functools.partial(_functional, op), "BackendSelect", with_keyset=True)
    return library


def _functional(
    op: torch._ops.OpOverload, keys: torch._C.DispatchKeySet, tensors: Any, reduce_op: str, *args: Any, **kwargs: Any
) -> Any:
    if reduce_op.lower() not in ("min", "max"):
        _require_exact(str(op), [tensors])
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    return op.redispatch(keys & below, tensors, reduce_op, *args, **kwargs)


def _require_exact(asked: str, given: Iterable[object]) -> None:
    """Integers may be added in any order.

    Raises:
        FloatSumRefusedError: there are other numbers among the tensors.
    """
    if any(t.is_floating_point() or t.is_complex() for t in _tensors(given)):
        raise FloatSumRefusedError(
            f"{asked} would add floating-point numbers of several ranks in an order of its own; --deterministic-mode "
            "adds them with megatron.core.process_groups.ordered_reduce (integers, minimum and maximum are free)"
        )


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
