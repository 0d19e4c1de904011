"""``blocked_fold`` as one kernel: every slot is read once, wherever it lies, the sum is written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from megatron.core.ops.blocked_fold.kernels.blocked_fold import blocked_fold_kernel
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Launch, cdiv
from megatron.core.ops.registry import Guarantee, Variant

LAUNCH = Launch(
    kernel="blocked_fold",
    rule=lambda: {"BLOCK": 2048, "num_warps": 4},
    choices={"BLOCK": (512, 1024, 2048, 4096), "num_warps": (4, 8)},
)


def blocked_fold(
    slots_Rn: torch.Tensor | Sequence[torch.Tensor], block: int, out_n: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as the reference; a slot may also lie in the memory of another GPU."""
    slots = [slot_n if slot_n.stride(0) == 1 else slot_n.contiguous() for slot_n in slots_Rn]
    if not slots:
        raise ValueError("blocked_fold needs at least one slot")
    double = slots[0].dtype == torch.float64
    if out_n is None:
        out_n = torch.empty(slots[0].shape, dtype=torch.float64 if double else torch.float32, device=slots[0].device)
    numel = out_n.numel()
    if numel:
        launch = LAUNCH.config(out_n.device)
        run_kernel(
            blocked_fold_kernel, (cdiv(numel, launch["BLOCK"]),),
            tuple(slots), out_n, numel,
            GROUP=block, WIDE=tl.float64 if double else tl.float32, **launch,
        )  # fmt: skip
    return out_n


VARIANT = Variant(
    name="deterministic_triton",
    fn=blocked_fold,
    guarantee={"cuda": Guarantee.LAYOUT},
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float64}),
    why="One thread adds all slots of an element in slot order.",
    sources=(
        "megatron.core.ops.blocked_fold.kernels.blocked_fold",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
