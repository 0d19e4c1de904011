"""``blocked_fold`` as one kernel: every slot is read once, the sum is written once."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.blocked_fold.kernels.blocked_fold import blocked_fold_kernel
from megatron.core.ops.registry import Guarantee, Variant

BLOCK = 2048


def blocked_fold(slots_Rn: torch.Tensor, block: int) -> torch.Tensor:
    """Same contract as the reference."""
    slots, numel = slots_Rn.shape
    if not slots:
        raise ValueError("blocked_fold needs at least one slot")
    if slots_Rn.stride(1) != 1:
        slots_Rn = slots_Rn.contiguous()
    wide = torch.float64 if slots_Rn.dtype == torch.float64 else torch.float32
    out_n = torch.empty(numel, dtype=wide, device=slots_Rn.device)
    if numel:
        blocked_fold_kernel[(triton.cdiv(numel, BLOCK),)](
            slots_ptr=slots_Rn,
            out_ptr=out_n,
            numel=numel,
            stride=slots_Rn.stride(0),
            SLOTS=slots,
            GROUP=block,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out_n


VARIANT = Variant(
    name="deterministic_triton",
    fn=blocked_fold,
    guarantee={"cuda": Guarantee.LAYOUT},
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float64}),
    why="One thread adds all slots of an element in slot order.",
    sources=("megatron.core.ops.blocked_fold.kernels.blocked_fold",),
)
