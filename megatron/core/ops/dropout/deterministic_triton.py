"""``dropout`` as one Triton kernel, used both ways: no mask is stored, the backward makes it again."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.dropout.kernels.dropout import dropout_kernel
from megatron.core.ops.dropout.reference import check
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.philox import Key
from megatron.core.ops.registry import Guarantee, Variant

WIDEST = 2048


def _rule(width: int) -> Config:
    """2,048 elements, of several rows where they are shorter."""
    block = max(8, power_of_two(width))
    return {"ROWS": WIDEST // block, "BLOCK": block, "num_warps": 4}


LAUNCH = Launch(kernel="dropout", rule=_rule, choices={"BLOCK": (512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8)})
"""By the length of what lies in one piece, up to WIDEST."""

Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def _four_dims(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Extents and global strides of the box with neighbouring whole dims joined, as four dims; the first index.

    Raises:
        ValueError: more than four dims are left.
    """
    extents, strides = [1], [0]
    start = sum(begin * math.prod(shape[dim + 1 :]) for dim, (begin, _) in enumerate(box))
    for dim, (begin, end) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        if end - begin == 1:
            continue
        if strides[-1] == stride * (end - begin):
            extents[-1] *= end - begin
            strides[-1] = stride
        else:
            extents.append(end - begin)
            strides.append(stride)
    if strides[-1] != 1:
        extents.append(1)
        strides.append(1)
    if len(extents) > 5 or (len(extents) == 5 and extents[0] != 1):
        raise ValueError(f"dropout of a box with more than four separate dims: {box} of {shape}")
    extents, strides = extents[-4:], strides[-4:]
    missing = 4 - len(extents)
    return (1,) * missing + tuple(extents), (0,) * missing + tuple(strides), start


def _dropped(x: torch.Tensor, key: Key, shape: tuple[int, ...], box: Box, p: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    (_, n1, n2, n3), (g0, g1, g2, _), start = _four_dims(shape, box)
    launch = LAUNCH.config(x.device, min(n3, WIDEST))
    rows, pieces = x.numel() // n3, cdiv(n3, launch["BLOCK"])
    run_kernel(
        dropout_kernel, (cdiv(rows, launch["ROWS"]) * pieces,),
        x, out, rows, pieces, n1, n2, n3, g0, g1, g2, start, key[0], key[1], round(p * 2.0**32), 1.0 / (1.0 - p),
        ALIGNED=all(place % 4 == 0 for place in (start, g0, g1, g2)), **launch,
    )  # fmt: skip
    return out


class _Dropout(Node):
    @staticmethod
    def forward(ctx, x: torch.Tensor, key: Key, shape: tuple[int, ...], box: Box, p: float) -> torch.Tensor:
        ctx.mask = (key, shape, box, p)
        return _dropped(x, key, shape, box, p)

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        return _dropped(dout, *ctx.mask), None, None, None, None


def dropout(x: torch.Tensor, key: Key, shape: tuple[int, ...], box: Box, p: float) -> torch.Tensor:
    """Same contract as the reference."""
    check(x, box, p)
    return _Dropout.apply(x, key, shape, box, p)


VARIANT = Variant(
    name="deterministic_triton",
    fn=dropout,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="Elementwise; the mask comes from integer arithmetic on global indices.",
    sources=(
        "megatron.core.ops.dropout.kernels.dropout",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
