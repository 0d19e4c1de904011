"""Buffers that the ranks of one NVLink domain read in each other: ordered sums without a send.

Every member keeps a buffer that the others have mapped. A sum is then one kernel that reads the members' terms where
they lie, in the stated order; what is left to a transport is the meeting before and after. Same bits as
``OrderedSums``. Multicast (sums made inside the switch) is not used: its order is the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megatron.core.process_groups.groups import Group


class PeerMemory:
    """``numel`` elements of each member, readable by all; collective. CUDA only, peers of one NVLink domain only.

    Raises:
        RuntimeError: the devices cannot map each other's memory.
    """

    def __init__(self, group: Group, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        if group.handle is None:
            raise RuntimeError("a group of one has no peers")
        self.group = group
        self.mine = symmetric_memory.empty(numel, dtype=dtype, device=device)
        self._handle = symmetric_memory.rendezvous(self.mine, group.handle)
        self.of_member = [self._handle.get_buffer(member, (numel,), dtype) for member in range(group.size)]

    def meet(self) -> None:
        """Everything that members have queued before is done and visible to whatever they queue afterwards."""
        self._handle.barrier(channel=0)


class PeerSums:
    """Ordered sums over a group through peers' memory, for tensors of up to ``memory.mine.numel()`` elements that
    divide by the members; ``fold`` is the op ``blocked_fold``."""

    def __init__(self, memory: PeerMemory, fold: Callable[..., torch.Tensor]) -> None:
        self._memory, self._fold = memory, fold

    def reduce_scatter(self, flat: torch.Tensor, block: int) -> torch.Tensor:
        """The fp32 sum of everyone's piece of this rank, ``[n]``, of ``flat`` ``[size * n]``. ``flat`` may be the start
        of the buffer itself, and is then read where it lies."""
        memory, group = self._memory, self._memory.group
        mine, piece = memory.mine[: flat.numel()], flat.numel() // group.size
        if flat.data_ptr() != mine.data_ptr():
            self._show(flat, piece)
        memory.meet()
        own = flat.narrow(0, group.rank * piece, piece)
        total = self._fold(self._terms(own, piece), block)
        # Nobody writes into a buffer that another still reads.
        memory.meet()
        return total

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, rounded once to the tensor's type; same shape. Every member sums one piece and takes the
        others' from where they were made."""
        memory, group = self._memory, self._memory.group
        flat, out = tensor.reshape(-1), torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        piece, result = flat.numel() // group.size, out.view(-1)
        self._show(flat, piece)
        memory.meet()
        at = group.rank * piece
        made = self._fold(self._terms(flat.narrow(0, at, piece), piece), group.size, memory.mine.narrow(0, at, piece))
        memory.meet()
        for step in range(group.size):
            # Everyone starts at another member.
            member = (group.rank + step) % group.size
            source = made if step == 0 else memory.of_member[member].narrow(0, member * piece, piece)
            result.narrow(0, member * piece, piece).copy_(source)
        # Nobody writes into a buffer that another still reads.
        memory.meet()
        return out

    def _show(self, flat: torch.Tensor, piece: int) -> None:
        """Copy what the others read: all but the piece of this rank."""
        before, after = self._memory.group.rank * piece, (self._memory.group.rank + 1) * piece
        self._memory.mine[:before].copy_(flat[:before])
        self._memory.mine[after : flat.numel()].copy_(flat[after:])

    def _terms(self, own: torch.Tensor, piece: int) -> list[torch.Tensor]:
        group = self._memory.group
        at = group.rank * piece
        return [own if r == group.rank else self._memory.of_member[r].narrow(0, at, piece) for r in range(group.size)]
