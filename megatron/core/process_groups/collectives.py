"""Collectives whose result does not depend on how the transport works: rank-indexed copies, integer sums, maxima.

Nothing here adds floating-point numbers; those sums live in ``ordered_reduce``. Copies keep every bit of every type on
every backend. Functions return new tensors unless they say otherwise, and send nothing in a group of one.
Those called ``start_...`` return at once, with a function that waits for the result; told to a probe they wait
themselves, so that a trace shows what arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron.core.process_groups import backend
from megatron.core.process_groups.groups import Group

_P = ParamSpec("_P")
_R = TypeVar("_R")


def told(collective: Callable[Concatenate[Group, _P], _R]) -> Callable[Concatenate[Group, _P], _R]:
    """``collective`` that tells the group's probe, where it has one, what goes in and what comes out."""

    @functools.wraps(collective)
    def call(group: Group, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if group.probe is None or group.size == 1:
            return collective(group, *args, **kwargs)
        name = collective.__name__
        meta = {
            "axis": group.axis,
            "ranks": list(group.ranks),
            "seq": group.probe.count(f"{name} {group.axis} {group.ranks}"),
        }
        given = {"args": args, "kwargs": kwargs}
        rows = name == "all_to_all_rows"
        return group.probe.around(
            "collective", name, lambda: collective(group, *args, **kwargs), ins=given, meta=meta, rows=rows
        )

    return call


Waiting = Callable[[], None]
"""Waits for what was started; on CUDA the current stream does."""


def nothing_to_wait_for() -> None:
    """The ``Waiting`` of what is there already."""


@told
def all_gather(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """``[size, *shape]``: every member's tensor (equal shapes), in group order."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor.unsqueeze(0).clone()
    rows = tensor if tensor.dim() else tensor.view(1)
    out = torch.empty((group.size * rows.shape[0], *rows.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    backend.all_gather(group.handle, out, rows)
    return out.view(group.size, *tensor.shape)


def _slot_each(group: Group, slots: torch.Tensor) -> torch.Tensor:
    """The slots, contiguous, one for each member."""
    if slots.shape[0] != group.size:
        raise ValueError(f"all_to_all over {group.size} members got {slots.shape[0]} slots")
    return slots.contiguous()


@told
def all_to_all(group: Group, slots: torch.Tensor) -> torch.Tensor:
    """``slots[j]`` goes to member j; the result's ``[j]`` came from member j. Same shape in and out, dim 0 = size."""
    slots = _slot_each(group, slots)
    if group.size == 1:
        return slots.clone()
    out = torch.empty_like(slots)
    backend.all_to_all(group.handle, out, slots)
    return out


@told
def all_to_all_terms(group: Group, slots: torch.Tensor) -> Sequence[torch.Tensor]:
    """``all_to_all`` for a reader: one tensor per member, of which this member's own may still lie in ``slots``."""
    return _start_terms(group, slots)()


def start_all_to_all_terms(group: Group, slots: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """``all_to_all_terms`` that the host does not wait for: call the result for what was received. Leave ``slots``
    alone until that has been read. On CUDA it is part of the current stream, as any kernel."""
    if group.probe is None or group.size == 1:
        return _start_terms(group, slots)
    received = all_to_all_terms(group, slots)
    return lambda: received


def _start_terms(group: Group, slots: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    slots = _slot_each(group, slots)
    if group.size == 1:
        return lambda: slots
    if dist.get_backend(group.handle) == "nccl":
        # Empty tensors are not sent: a copy to oneself takes as long as a transfer to a neighbour.
        sent = [slot if member != group.rank else slot[:0] for member, slot in enumerate(slots)]
        terms = [torch.empty_like(slot) for slot in sent]
        backend.all_to_all_pieces(group.handle, terms, sent)
        terms[group.rank] = slots[group.rank]
        return lambda: terms
    out = torch.empty_like(slots)
    work = backend.all_to_all(group.handle, out, slots, beside=not slots.is_cuda)

    def arrived() -> torch.Tensor:
        if work is not None:
            work.wait()
        return out

    return arrived


def start_all_gather(group: Group, whole: torch.Tensor) -> Waiting:
    """Complete a flat tensor of ``size`` equal cuts, of which each member has filled its own, in place. Leave it alone
    until the result was called. On CUDA it runs beside the current stream, after what that has been given before."""
    if group.size == 1:
        return nothing_to_wait_for
    cut = whole.numel() // group.size
    mine = whole[group.rank * cut : (group.rank + 1) * cut]
    if group.probe is not None:
        whole.copy_(all_gather(group, mine).view(-1))
        return nothing_to_wait_for
    work = backend.all_gather(group.handle, whole, mine, beside=True)
    return lambda: backend.complete(work)


@told
def all_to_all_rows(
    group: Group, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> torch.Tensor:
    """Exchange unequal numbers of rows ``[R, ...]``: the first ``send_counts[0]`` go to member 0 and so on; received
    rows are ordered by sender. Works for empty pieces."""
    rows = rows.contiguous()
    if group.size == 1:
        return rows.clone()
    out = torch.empty((sum(receive_counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    backend.all_to_all(group.handle, out, rows, receive_counts, send_counts)
    return out


@told
def sum_integers(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Sum of an integer tensor over the group; exact in any order (int64 wraps).

    Raises:
        TypeError: the tensor is not of an integer type; sums of floats belong to ``ordered_reduce``.
    """
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sum_integers got {tensor.dtype}; floating-point sums belong to ordered_reduce")
    out = tensor.clone()
    if group.size > 1:
        backend.all_reduce(group.handle, out)
    return out


@told
def maximum(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum over the group; the same in any order. NaN is not supported."""
    out = tensor.clone()
    if group.size > 1:
        backend.all_maximum(group.handle, out)
    return out


def barrier(group: Group) -> None:
    """Wait until every member is here."""
    if group.size > 1:
        dist.barrier(group=group.handle)


def exchange(
    group: Group, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Point-to-point transfers of one moment, all started together, waited for before return (on CUDA: in stream
    order). ``sends`` and ``receives`` pair a member's position with a contiguous tensor; between two members,
    transfers match in list order."""
    start_exchange(group, sends, receives)()


def start_exchange(
    group: Group, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> Waiting:
    """``exchange`` that nobody waits for until the result is called: received tensors are not there before, and sent
    ones must not change. Members start their exchanges in one order."""
    if group.probe is None or not (sends or receives):
        return _start_exchange(group, sends, receives)
    given = {_channel(group, group.rank, peer): tensor for peer, tensor in sends}
    filled = {_channel(group, peer, group.rank): tensor for peer, tensor in receives}
    group.probe.around(
        "collective",
        "exchange",
        lambda: _start_exchange(group, sends, receives)(),
        ins=given,
        outs=filled,
        meta={"axis": group.axis, "ranks": list(group.ranks)},
    )
    return nothing_to_wait_for


def _channel(group: Group, source: int, target: int) -> str:
    """Name of the next transfer from one member to another; both ends give it the same."""
    pair = f"{group.axis} {group.ranks[source]}->{group.ranks[target]}"
    return f"{pair} #{group.probe.count(pair)}"


def _start_exchange(
    group: Group, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> Waiting:
    if not (sends or receives):
        return nothing_to_wait_for
    on_the_way = receives
    if (sends or receives)[0][1].is_cuda and dist.get_backend(group.handle) == "gloo":
        # It sends and receives in host memory only.
        sends = [(peer, tensor.cpu()) for peer, tensor in sends]
        on_the_way = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in receives]
    ops = [dist.P2POp(dist.irecv, backend.carried(t), group.ranks[peer], group.handle) for peer, t in on_the_way]
    ops += [dist.P2POp(dist.isend, backend.carried(t), group.ranks[peer], group.handle) for peer, t in sends]
    # Holds the operations, and so the tensors, until they are waited for.
    started = dist.batch_isend_irecv(ops), ops

    def wait() -> None:
        for work in started[0]:
            work.wait()
        if on_the_way is not receives:
            for (_, tensor), (_, arrived) in zip(receives, on_the_way, strict=True):
                tensor.copy_(arrived)

    return wait


def gather_objects(group: Group, value: object) -> list[object]:
    """Every member's picklable value, in group order; for start-up and end of run, not for the step."""
    if group.size == 1:
        return [value]
    out: list[object] = [None] * group.size
    dist.all_gather_object(out, value, group=group.handle)
    return out
