"""``norm_blocks`` as one pass of Triton over the tensor and one integer sum over its programs."""

from __future__ import annotations

import torch

from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, cdiv
from megatron.core.ops.norm_blocks.kernels.norm_blocks import norm_blocks_kernel
from megatron.core.ops.norm_blocks.limbs import BLOCK, LIMBS, SIZE, UNIT_EXPONENT
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="norm_blocks",
    rule=lambda: {"PROGRAMS": 1 << 14, "num_warps": 1},
    choices={"PROGRAMS": (1 << 12, 1 << 13, 1 << 14, 1 << 15), "num_warps": (1, 2, 4)},
)
_ROW = 32


def norm_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Same contract as the reference."""
    if flat.dim() != 1 or flat.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"norm_blocks of {flat.dtype}{tuple(flat.shape)}")
    if not flat.numel():
        return torch.zeros(SIZE, dtype=torch.int64, device=flat.device)
    blocks = cdiv(flat.numel(), BLOCK)
    launch = LAUNCH.config(flat.device)
    blocks_each = cdiv(blocks, launch["PROGRAMS"])
    programs = cdiv(blocks, blocks_each)
    limbs = flat.new_empty(programs, _ROW, dtype=torch.int64)
    run_kernel(
        norm_blocks_kernel, (programs,),
        flat.detach().contiguous(), limbs, flat.numel(), blocks_each,
        BLOCK=BLOCK, LIMBS=LIMBS, UNIT_EXPONENT=UNIT_EXPONENT, num_warps=launch["num_warps"],
    )  # fmt: skip
    return limbs[:, :SIZE].sum(dim=0)


VARIANT = Variant(
    name="deterministic_triton",
    fn=norm_blocks,
    guarantee={"cuda": Guarantee.LAYOUT},
    why="The stated tree inside each block, exact integer sums of the blocks.",
    sources=(
        "megatron.core.ops.norm_blocks.kernels.norm_blocks",
        "megatron.core.ops.norm_blocks.limbs",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
