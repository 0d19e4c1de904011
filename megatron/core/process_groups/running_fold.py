"""RunningFold: a blocked fold whose members arrive part by part, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Slots: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""Equally long contributions ``[n]``: the rows of a tensor, or tensors of their own."""

Fold = Callable[[Slots, int], torch.Tensor]
"""``fold(slots, block) -> [n]`` in fp32 (fp64 for fp64): the op ``blocked_fold``."""


class RunningFold:
    """The sum of ``members`` equally long contributions, left to right inside blocks of ``block`` consecutive ones,
    then over the blocks; the first term of either is copied, not added to zero.

    However the members are cut into parts, the additions are the same ones in the same order. Between two parts it
    keeps at most two tensors: the sum of the open block and the sum of the closed ones.
    """

    def __init__(self, members: int, block: int, fold: Fold) -> None:
        self.members, self.block, self.arrived = members, block, 0
        self._fold = fold
        self._open: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    @property
    def kept(self) -> int:
        """Tensors kept now."""
        return (self._open is not None) + (self._total is not None)

    def add(self, slots: Slots) -> None:
        """The next members, one per row.

        Raises:
            ValueError: these are more than are missing.
        """
        rows = len(slots)
        self._expect(rows)
        if rows == self.members:
            self._total = self._fold(slots, self.block)
            self.arrived = rows
            return
        start = 0
        while start < rows:
            inside = self.arrived % self.block
            stop = min(rows, start + self.block - inside)
            self._continue_block(slots[start:stop])
            self.arrived += stop - start
            start = stop
            if self.arrived % self.block == 0 or self.arrived == self.members:
                self._close_block()

    def closes(self, count: int) -> bool:
        """Whether the next ``count`` members are one whole block; the last block may have less than ``block``."""
        last = self.arrived + count == self.members
        return self._open is None and (count == self.block or (last and count < self.block))

    def add_block(self, total: torch.Tensor, count: int) -> None:
        """The sum of the next ``count`` members, which are one block; it belongs to the fold from now on.

        Raises:
            ValueError: they are not.
        """
        if not self.closes(count):
            raise ValueError(f"{count} members after {self.arrived} are no block of {self.block}")
        self._expect(count)
        self._open, self.arrived = total, self.arrived + count
        self._close_block()

    def add_blocks(self, sums: Slots) -> None:
        """The sums of the next whole blocks, one per row, each made as a block's sum is made here.

        Raises:
            ValueError: a block is open, or these are more than are missing.
        """
        rows = len(sums)
        if self._open is not None:
            raise ValueError(f"whole blocks after {self.arrived} members in blocks of {self.block}")
        self._expect(rows * self.block)
        self.arrived += rows * self.block
        if self._total is None:
            self._total = self._fold(sums, rows)
        else:
            for row in sums:
                self._total.add_(row)

    def result(self) -> torch.Tensor:
        """The sum.

        Raises:
            ValueError: members are missing.
        """
        if self._total is None or self.arrived != self.members:
            raise ValueError(f"{self.arrived} of {self.members} members have arrived")
        return self._total

    def _expect(self, count: int) -> None:
        if count < 1 or self.arrived + count > self.members:
            raise ValueError(f"{count} members after {self.arrived} of {self.members}")

    def _continue_block(self, slots: Slots) -> None:
        if self._open is None:
            self._open = self._fold(slots, len(slots))
        else:
            for slot in slots:
                self._open.add_(slot)

    def _close_block(self) -> None:
        if self._total is None:
            self._total = self._open
        elif self._open is not None:
            self._total.add_(self._open)
        self._open = None
