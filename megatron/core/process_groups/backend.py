"""A process group's own collectives, for ``collectives`` and ``ordered_reduce``.

``torch.distributed``'s functions come down to these calls with these options, and take the host four times as long for
what a ``Group`` knows already: that this rank is a member, that tensors have one type. ``beside`` is their
``async_op``: without it the call is complete when it returns, on CUDA for what the current stream is given next; with
it the ``Work`` says when. Methods are looked up at every call, so that a guard on the class sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_CARRIED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Types that gloo and NCCL both have; a copy of them is a copy of bytes."""


def _named(new: str, old: str) -> str:
    """torch 2.13 has other names, and will drop the older ones."""
    return new if hasattr(dist.ProcessGroup, new) else old


_ALL_GATHER = _named("all_gather_single", "_allgather_base")
_ALL_TO_ALL = _named("all_to_all_single", "alltoall_base")
_REDUCE_SCATTER = _named("reduce_scatter_single", "_reduce_scatter_base")


def _options(kind: str, *, beside: bool = False, op: Any = None) -> Any:
    options = getattr(dist.distributed_c10d, kind)()
    options.asyncOp = beside
    if op is not None:
        options.reduceOp = op
    return options


_GATHER = tuple(_options("AllgatherOptions", beside=beside) for beside in (False, True))
_EXCHANGE = tuple(_options("AllToAllOptions", beside=beside) for beside in (False, True))
_SUM_AND_SCATTER = _options("ReduceScatterOptions", op=dist.ReduceOp.SUM)
_SUM = _options("AllreduceOptions", op=dist.ReduceOp.SUM)
_MAXIMUM = _options("AllreduceOptions", op=dist.ReduceOp.MAX)


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in a type that every backend copies: itself, or ``[*shape, bytes]``."""
    return tensor if tensor.dtype in _CARRIED else tensor.unsqueeze(-1).view(torch.uint8)


def complete(work: dist.Work | None) -> None:
    """Wait for it, on CUDA the current stream; ``None`` where the call itself has seen to that."""
    if work is not None:
        work.wait()


def _begun(work: dist.Work | None, beside: bool) -> dist.Work | None:
    if beside:
        return work
    complete(work)
    return None


def all_gather(group: Any, out: torch.Tensor, tensor: torch.Tensor, *, beside: bool = False) -> dist.Work | None:
    """``out [size * n, ...]``: every member's ``tensor [n, ...]``, in group order."""
    return _begun(getattr(group, _ALL_GATHER)(carried(out), carried(tensor), _GATHER[beside]), beside)


def all_to_all(
    group: Any,
    out: torch.Tensor,
    tensor: torch.Tensor,
    receive: Sequence[int] = (),
    send: Sequence[int] = (),
    *,
    beside: bool = False,
) -> dist.Work | None:
    """Rows along dim 0: ``send[j]`` of ``tensor`` to member j, ``receive[j]`` of ``out`` from it; equally many for each
    where nothing is said."""
    exchange = getattr(group, _ALL_TO_ALL)
    return _begun(exchange(carried(out), carried(tensor), receive, send, _EXCHANGE[beside]), beside)


def all_to_all_pieces(group: Any, out: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
    """``pieces[j]`` goes to member j, ``out[j]`` comes from it."""
    complete(group.alltoall([carried(t) for t in out], [carried(t) for t in pieces], _EXCHANGE[False]))


def reduce_scatter(group: Any, out: torch.Tensor, tensor: torch.Tensor) -> None:
    """``out``: this member's part, along dim 0, of the sum in the backend's order."""
    complete(getattr(group, _REDUCE_SCATTER)(out, tensor, _SUM_AND_SCATTER))


def all_reduce(group: Any, tensor: torch.Tensor) -> None:
    """The sum in the backend's order, in place."""
    complete(group.allreduce([tensor], _SUM))


def all_maximum(group: Any, tensor: torch.Tensor) -> None:
    """The elementwise maximum, in place."""
    complete(group.allreduce([tensor], _MAXIMUM))
