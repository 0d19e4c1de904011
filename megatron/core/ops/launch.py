"""How Triton kernels are launched: by the rows of a committed table and, for a shape without a row, by a stated rule.

Nothing is timed at run time. ``launch_table.json`` has a row per kernel, GPU and class of shapes, which
``tools/bench/tune.py`` measured; any other GPU, and the CPU, takes the rule that stands beside the kernel's wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from megatron.core.ops.launch_table import TABLE_FILE, Config, Key, table_of

TILE = 2048
ELEMENTS_PER_THREAD = 16

TABLE: dict[Key, Config] = table_of(TABLE_FILE.read_text("utf-8"))
_COMMITTED = TABLE
_KNOWN: dict[tuple[str, torch.device, tuple[int, ...]], Config] = {}
"""What the committed table and the rules said, by kernel, device and sizes."""
MOST_KNOWN = 1024
"""Sizes may be new in every step; beyond this many it starts again."""


def cdiv(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up; Triton's takes the host some microseconds."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


@cache
def gpu_name(device: torch.device) -> str:
    """The GPU's name as the table has it; empty for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        kernel: its name in the table.
        rule: ``rule(*sizes)``: the configuration where the table has no row.
        choices: what a tuner may try, by key of the configuration.
        new_bits: those keys that take part in an order of additions. Their values belong to what the op promises; a
            tuner leaves them alone unless told otherwise.
    """

    kernel: str
    rule: Callable[..., Config]
    choices: Mapping[str, Sequence[int]]
    new_bits: frozenset[str] = field(default_factory=frozenset)

    def config(self, device: torch.device, *sizes: int) -> Mapping[str, int]:
        """The configuration for ``sizes``, each of which counts in the table as the next power of two; for reading.

        It is remembered unless another table stands in the place of the committed one.
        """
        if TABLE is not _COMMITTED:
            return self._found(device, sizes)
        asked = (self.kernel, device, sizes)
        known = _KNOWN.get(asked)
        if known is None:
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.clear()
            known = _KNOWN[asked] = self._found(device, sizes)
        return known

    def _found(self, device: torch.device, sizes: tuple[int, ...]) -> Config:
        row = TABLE.get((self.kernel, gpu_name(device), tuple(map(power_of_two, sizes))))
        return self.rule(*sizes) if row is None else row


def row_rule(width: int, *_: int) -> Config:
    """A tile holds whole rows and at least 2,048 elements, 16 to a thread, 1 to 8 warps."""
    block = power_of_two(width)
    rows = max(1, TILE // block)
    warps = power_of_two(block * rows // (32 * ELEMENTS_PER_THREAD))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(8, max(1, warps))}


def rows_in_pieces(width: int, least: int, most: int) -> Config:
    """A tile holds whole rows, in at most ``most`` pieces, at least ``least`` elements; 256 of a piece to a warp."""
    piece = least
    while piece * most < width:
        piece *= 2
    block = min(piece, power_of_two(width))
    rows = max(1, least // block)
    return {"ROWS": rows, "PIECE": block, "num_warps": min(32, max(1, rows * block // 256))}


def piece_rule(longest: int, per_warp: int, max_warps: int) -> Callable[..., Config]:
    """A program takes a row, or a piece of ``longest`` elements of it; ``per_warp`` elements to a warp."""

    def rule(width: int, *_: int) -> Config:
        block = min(longest, power_of_two(width))
        return {"BLOCK": block, "num_warps": min(max_warps, max(1, block // per_warp))}

    return rule


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the matrix of its last dimension's rows, elements of a row adjacent; copied only where it has to be."""
    dims = x.dim()
    x_RX = x if dims == 2 else x.flatten(0, -2) if dims > 1 else x.unsqueeze(0)
    return x_RX if x_RX.stride(-1) == 1 else x_RX.contiguous()
