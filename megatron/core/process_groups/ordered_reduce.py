"""The one module, with ``running_fold``, that adds floating-point numbers over ranks. (What experts send back to a
token is added where the token is, in the order of ``moe_unpermute``.)

``OrderedSums`` moves every rank's contribution to the rank that needs it and adds there in fp32, in an order given by
the members' positions alone; transport, ring and timing cannot change a bit. ``NativeSums`` leaves the addition to the
backend and promises nothing; it is the baseline that the cost of order is measured against.

The order is the *blocked fold*: members are added left to right inside blocks of ``block`` consecutive members, then
the block sums left to right; the first term is copied, not added to zero.

Two members have one addition, the same in either order. On one machine NCCL adds while it transfers
(``_adds_in_transit``), with the same bits: in fp32 and fp64 it is that addition; and of two bf16 or fp16 values, the
sum rounded to fp32 and then to their type is the sum rounded once, as fp32 has more than twice their digits and two
(S. A. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30, 1995).
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.core.process_groups import backend
from megatron.core.process_groups.collectives import (
    Waiting,
    all_gather,
    all_to_all_terms,
    nothing_to_wait_for,
    start_all_gather,
    start_all_to_all_terms,
    told,
)
from megatron.core.process_groups.float_sum_guard import stated_order
from megatron.core.process_groups.groups import Group
from megatron.core.process_groups.running_fold import RunningFold, Slots

_SMALL_BYTES = 1 << 15
_SUMMED_AS_THEY_ARE = (torch.float32, torch.float64)
"""Types of which a sum is not wider than its terms."""


def _adds_in_transit(group: Group, tensor: torch.Tensor) -> bool:
    """Whether the backend's sum is the sum in the stated order: see the head of the file. Not between machines, where
    switches may add."""
    if group.size != 2 or group.spread or not tensor.is_cuda:
        return False
    return dist.get_backend(group.handle) == "nccl"


def _scattered_by_backend(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
    backend.reduce_scatter(group.handle, out, tensor.contiguous())
    return out


def _reduced_by_backend(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    backend.all_reduce(group.handle, out)
    return out


@told
def reduce_scatter_of_two(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """This member's half, along dim 0, of the sum over a group of two, in the tensor's type."""
    with stated_order:
        return _scattered_by_backend(group, tensor)


@told
def all_reduce_of_two(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over a group of two, in the tensor's type."""
    with stated_order:
        return _reduced_by_backend(group, tensor)


class FloatSums(Protocol):
    """Sums of floating-point tensors over a group."""

    def reduce_scatter(self, group: Group, flat: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """``flat`` is 1-D of ``size * n`` elements; returns the fp32 sum of everyone's piece ``rank``, ``[n]``.

        ``block`` is the fold's block (default: one block of all members).
        """
        ...

    def start_fold(self, group: Group, members: int, block: int) -> RunningFold:
        """A sum over ``members`` logical members, of which each call of ``reduce_scatter_part`` brings one per rank."""
        ...

    def reduce_scatter_part(self, group: Group, flat: torch.Tensor, running: RunningFold) -> Waiting:
        """Begin to add the next ``size`` members to ``running``: ``flat`` as in ``reduce_scatter``, and the member of
        rank r is the r-th of them. With all members at once it is ``reduce_scatter``.

        They have been added once the result was called; leave ``flat`` alone until then. Parts of one sum are begun,
        and their results called, in order. On CUDA both belong to the stream that is current."""
        ...

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in fp32 over the group, rounded once to the tensor's type; same shape."""
        ...

    def reduce_scatter_rows(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Rows ``[size * r, ...]`` in, this member's ``r`` rows of the sum out, rounded once to the tensor's type."""
        ...


class FoldInto(Protocol):
    """The op ``blocked_fold``: ``[n]`` in fp32 (fp64 for fp64), or rounded into ``out``."""

    def __call__(self, slots: Slots, block: int, out: torch.Tensor | None = None, /) -> torch.Tensor:
        """The sum."""
        ...


class OrderedSums:
    """Sums whose order is stated: see the head of the file."""

    def __init__(self, fold: FoldInto) -> None:
        self._fold = fold

    def reduce_scatter(self, group: Group, flat: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter``."""
        running = self.start_fold(group, group.size, block or group.size)
        self.reduce_scatter_part(group, flat, running)()
        return running.result()

    def start_fold(self, group: Group, members: int, block: int) -> RunningFold:
        """As ``FloatSums.start_fold``."""
        return RunningFold(members, block, self._fold)

    def reduce_scatter_part(self, group: Group, flat: torch.Tensor, running: RunningFold) -> Waiting:
        """As ``FloatSums.reduce_scatter_part``; in two stages where the group has blocks and the sum has the same. Only
        the first of them is on its way before the result is called."""
        if flat.dtype in _SUMMED_AS_THEY_ARE and running.closes(group.size) and _adds_in_transit(group, flat):
            running.add_block(reduce_scatter_of_two(group, flat), group.size)
            return nothing_to_wait_for
        slots = flat.view(group.size, -1)
        blocks = group.blocks
        if blocks is None or blocks.inside.size != running.block:
            received = start_all_to_all_terms(group, slots)
            return lambda: running.add(received())
        # Member i of each block first sums, over its block, the pieces of all members that have place i in theirs;
        # then those members exchange what belongs to each.
        inside, across = blocks.inside, blocks.across
        by_place = slots.view(across.size, inside.size, -1).transpose(0, 1).reshape(inside.size, -1)
        received = start_all_to_all_terms(inside, by_place)

        def add() -> None:
            mine = self._fold(received(), inside.size)
            running.add_blocks(all_to_all_terms(across, mine.view(across.size, -1)))

        return add

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.all_reduce``. Short tensors travel whole and are folded everywhere; same order, same bits."""
        if group.size == 1:
            return tensor.clone()
        if _adds_in_transit(group, tensor):
            return all_reduce_of_two(group, tensor)
        if tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            slots = all_gather(group, tensor.reshape(-1))
            return self._fold(slots, group.size).to(tensor.dtype).view(tensor.shape)
        flat, padding = tensor.reshape(-1), -tensor.numel() % group.size
        if padding:
            flat = torch.cat([flat, flat.new_zeros(padding)])
        terms = all_to_all_terms(group, flat.view(group.size, -1))
        whole = torch.empty_like(flat)
        self._fold(terms, group.size, whole.view(group.size, -1)[group.rank])
        start_all_gather(group, whole)()
        return whole[: tensor.numel()].view(tensor.shape)

    def reduce_scatter_rows(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter_rows``."""
        if group.size == 1:
            return tensor.clone()
        if _adds_in_transit(group, tensor):
            return reduce_scatter_of_two(group, tensor)
        shape = (tensor.shape[0] // group.size, *tensor.shape[1:])
        rows = tensor.new_empty(shape)
        self._fold(all_to_all_terms(group, tensor.reshape(group.size, -1)), group.size, rows.view(-1))
        return rows


def _plain_sum(slots: Slots, block: int) -> torch.Tensor:
    first, *others = slots
    return functools.reduce(torch.Tensor.add_, others, first.clone())


class NativeSums:
    """Sums left to the backend, in whatever order it takes; for the cost baseline only."""

    def reduce_scatter(self, group: Group, flat: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter``; ``block`` has no meaning here."""
        flat = flat if flat.dtype == torch.float64 else flat.float()
        if group.size == 1:
            return flat.clone()
        return _scattered_by_backend(group, flat)

    def start_fold(self, group: Group, members: int, block: int) -> RunningFold:
        """As ``FloatSums.start_fold``; every part is one term, and ``block`` has no meaning here."""
        parts = members // group.size
        return RunningFold(parts, parts, _plain_sum)

    def reduce_scatter_part(self, group: Group, flat: torch.Tensor, running: RunningFold) -> Waiting:
        """As ``FloatSums.reduce_scatter_part``, in the order of the parts only; there at once."""
        running.add(self.reduce_scatter(group, flat).unsqueeze(0))
        return nothing_to_wait_for

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.all_reduce``, except that the backend may round in between."""
        return tensor.clone() if group.size == 1 else _reduced_by_backend(group, tensor)

    def reduce_scatter_rows(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """As ``FloatSums.reduce_scatter_rows``, except that the backend may round in between."""
        if group.size == 1:
            return tensor.clone()
        return _scattered_by_backend(group, tensor)
