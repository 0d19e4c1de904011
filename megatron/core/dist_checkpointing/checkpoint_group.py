"""The ranks that save and load together, on a gloo group of their own, so that a thread can use it during training."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.process_groups.groups import Group

# A single process saves, and any rank loads, without a process group on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointGroup:
    """All ranks of the run. Make it on all of them together; alone it needs no process group.

    ``handle`` is ``None`` for a world of one.
    """

    def __init__(self, world: Group, timeout_minutes: int) -> None:
        self.rank, self.size = world.rank, world.size
        self.handle: dist.ProcessGroup | None = None
        if world.size > 1:
            self.handle = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=timeout_minutes))

    @property
    def is_first(self) -> bool:
        """True on the rank that moves folders and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self.handle is None:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.handle)
        return out

    def gather_on_first(self, value: Any) -> list[Any]:
        """On the first rank every rank's value, in rank order; nothing on the others, which would have to take it all
        in while they train."""
        if self.handle is None:
            return [value]
        out: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, out, group=self.handle)
        return out or []

    def failures(self, error: str | None) -> list[str]:
        """What went wrong on which ranks, the same list everywhere; empty where all went well."""
        return name_ranks(self.gather(error))


def name_ranks(errors: Sequence[str | None]) -> list[str]:
    """``rank 1: ...`` for each rank with an error; ranks with the same one are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(errors):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    return [f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in by_text.items()]
