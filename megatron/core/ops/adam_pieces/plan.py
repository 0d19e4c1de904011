"""UpdatePlan: the pieces an optimizer steps on, in its state and in the buffer of gradients and working weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.ops.digest_pieces.table import PieceAt, PieceTable

AT_ONCE = 1 << 24
"""Longest run: it bounds the temporaries of whoever works on a run at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRun:
    """Elements that are updated alike: ``length`` of them, from ``state`` on in the flat state and from ``buffer`` on
    in gradients and weights."""

    state: int
    buffer: int
    length: int
    decays: bool


class UpdatePlan:
    """``pieces`` lie in the flat state; piece i begins at element ``buffer[i]`` of the gradients and weights, and its
    weights decay if ``decays[i]``. Pieces ascend in both. Padding between two pieces may be updated with them: it is
    zero and stays so.
    """

    def __init__(self, pieces: Sequence[PieceAt], buffer: Sequence[int], decays: Sequence[bool]) -> None:
        self.table = PieceTable(pieces)
        self.buffer, self.decays = tuple(buffer), tuple(decays)
        self.in_buffer = PieceTable(
            PieceAt(name=p.name, shard=p.shard, start=p.start, length=p.length, offset=at)
            for p, at in zip(pieces, buffer, strict=True)
        )
        self.runs = tuple(part for run in self._whole_runs() for part in _cut(run))
        self._copies: dict[torch.device, torch.Tensor] = {}

    def _whole_runs(self) -> Iterator[UpdateRun]:
        open_run: UpdateRun | None = None
        for piece, at, decays in zip(self.table.pieces, self.buffer, self.decays, strict=True):
            if open_run is not None:
                gap = piece.offset - open_run.state
                if decays == open_run.decays and gap == at - open_run.buffer:
                    open_run = UpdateRun(
                        state=open_run.state, buffer=open_run.buffer, length=gap + piece.length, decays=decays
                    )
                    continue
                yield open_run
            open_run = UpdateRun(state=piece.offset, buffer=at, length=piece.length, decays=decays)
        if open_run is not None:
            yield open_run

    @property
    def alignment(self) -> int:
        """The largest number that divides all offsets and lengths; 0 where all are 0."""
        return math.gcd(*(n for piece in self.table.pieces for n in (piece.offset, piece.length)), *self.buffer)

    def on(self, device: torch.device) -> torch.Tensor:
        """int64 ``[P, 2]``: where each piece begins in the buffer, and 1 where it decays; made once."""
        if device not in self._copies:
            rows = list(zip(self.buffer, map(int, self.decays), strict=True))
            self._copies[device] = torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)
        return self._copies[device]


def _cut(run: UpdateRun) -> Iterator[UpdateRun]:
    for begin in range(0, run.length, AT_ONCE):
        length = min(AT_ONCE, run.length - begin)
        yield UpdateRun(state=run.state + begin, buffer=run.buffer + begin, length=length, decays=run.decays)
