"""A guard at run time: floating-point sums handed to a backend are refused, whoever asks for them.

The gate on our own sources sees ours; this one also sees a model of the user's (``--spec``) and outside packages. It
stands in three places. Two know what a call reduces by: the process group's own methods, where every Python caller of
torch.distributed ends up, also with a function that was imported before, and the functional collectives, which DTensor
and compiled graphs call. The third is where both of them, and callers in C++ such as DistributedDataParallel's reducer,
enter a backend; there the operation cannot be read, so what came by neither of the first two is taken for a sum.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
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
_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced",
)
_ENTRIES = (
    "allreduce_",
    "allreduce_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
)
_DEVICES = ("CPU", "CUDA")
# The same bits in any order and grouping: minimum, maximum, and integers.
_FREE_OF_ORDER = (ReduceOp.MIN, ReduceOp.MAX)
_FREE_BY_NAME = ("min", "max")


class FloatSumRefusedError(RuntimeError):
    """A floating-point sum over ranks whose order nobody states."""


class _Seen(threading.local):
    """Whether this thread is inside a call whose operation was read and found free of order."""

    free = False


_SEEN = _Seen()


def refuse_float_sums() -> Callable[[], None]:
    """Make every process group of this process refuse floating-point reductions other than minimum and maximum.

    Returns what takes the guard away again. Calling it twice guards once.
    """
    # The class's own entries: what getattr returns would not bind to an instance when it is put back.
    entries = {name: entry for name, entry in vars(ProcessGroup).items() if name in _METHODS}
    if any(hasattr(entry, "refuses_float_sums") for entry in entries.values()):
        return _nothing
    # Held by the methods, because a library that nobody holds takes its kernels with it.
    libraries = [_guard_ops("_c10d_functional", _FUNCTIONAL, _functional), _guard_ops("c10d", _ENTRIES, _entry)]
    for name in entries:
        guarded = _guarded(name, getattr(ProcessGroup, name))
        guarded.refuses_float_sums = libraries  # type: ignore[attr-defined]
        setattr(ProcessGroup, name, guarded)

    def remove() -> None:
        for name, entry in entries.items():
            setattr(ProcessGroup, name, entry)
        for library in libraries:
            library._destroy()

    return remove


def _nothing() -> None:
    """The guard that is there stays."""


@contextlib.contextmanager
def _free() -> Iterator[None]:
    before, _SEEN.free = _SEEN.free, True
    try:
        yield
    finally:
        _SEEN.free = before


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if _inexact(given) and _operation(given) not in _FREE_OF_ORDER:
            raise _refusal(f"ProcessGroup.{name}", dist.get_world_size(group))
        with _free():
            return method(group, *args, **kwargs)

    return call


Guard = Callable[[str, tuple[Any, ...]], None]


def _guard_ops(namespace: str, names: Iterable[str], guard: Guard) -> torch.library.Library:
    """Ask ``guard`` before the kernels of these ops. Gone with the library that is returned."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        # That a kernel is put in another's place is the point.
        warnings.simplefilter("ignore", UserWarning)
        # Which of them there are depends on torch's version.
        for name in (name for name in names if hasattr(getattr(torch.ops, namespace), name)):
            for device in _DEVICES:
                kernel = torch.library.get_kernel(f"{namespace}::{name}", device)
                library.impl(name, _asking(guard, name, kernel), device, with_keyset=True)
    return library


def _asking(guard: Guard, name: str, kernel: Any) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        guard(name, args)
        with _free():
            return kernel.call_boxed(keys, *args, **kwargs)

    return call


def _functional(name: str, args: tuple[Any, ...]) -> None:
    tensors, operation, *_, group = args
    if _inexact([tensors]) and operation.lower() not in _FREE_BY_NAME:
        known = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        raise _refusal(f"torch.ops._c10d_functional.{name}", known.size())


def _entry(name: str, args: tuple[Any, ...]) -> None:
    if not _SEEN.free and _inexact(args):
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        raise _refusal(f"torch.ops.c10d.{name}", ProcessGroup.unbox(group).size())


def _refusal(what: str, ranks: int) -> FloatSumRefusedError:
    return FloatSumRefusedError(
        f"{what} would add floating-point numbers of {ranks} ranks in an order of its own; --deterministic-mode adds "
        "them with megatron.core.process_groups.ordered_reduce (integers, minimum and maximum are free)"
    )


def _inexact(given: Iterable[object]) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in _tensors(given))


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
