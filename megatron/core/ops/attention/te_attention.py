"""``attention`` by Transformer Engine's ``DotProductAttention``, in its default and in its deterministic mode.

The code is one; an attention keeps the mode it was made in. Which kernels run, cuDNN's fused ones here, the package
decides by shapes and versions.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.attention import deterministic_torch_flash
from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant


@functools.cache
def _package() -> Any:
    # Before torch's first call of cuDNN: later two builds of cuDNN are mixed.
    return importlib.import_module("transformer_engine.pytorch")


@functools.cache
def _attention(heads: int, groups: int, width: int, scale: float, *, ordered: bool) -> Any:
    """An attention of these sizes; ``ordered`` is what it reads of torch's switch when it is made."""
    return _package().DotProductAttention(
        num_attention_heads=heads,
        kv_channels=width,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        softmax_scale=scale,
    )


def attention(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Same contract as the reference, for bf16 and head widths up to 128 that are multiples of 8."""
    if not q_SBND.numel() or q_SBND.shape[0] == 1:
        # cuDNN has no backward of single positions.
        return deterministic_torch_flash.attention(q_SBND, k_SBGD, v_SBGD, scale)
    heads, width, groups = q_SBND.shape[2], q_SBND.shape[3], k_SBGD.shape[2]
    ordered = torch.are_deterministic_algorithms_enabled()
    call = _attention(heads, groups, width, float(scale), ordered=ordered)
    # It reads the layout off the strides, and slices of a wider projection mislead it.
    out_SBX = call(*(x.contiguous() for x in (q_SBND, k_SBGD, v_SBGD)))
    return out_SBX.view(q_SBND.shape)


_SOURCES = ("megatron.core.ops.attention.deterministic_torch_flash", "megatron.core.ops.outside")
_WIDTHS = range(8, 129, 8)
_SWITCH = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

VARIANT = Variant(
    name="te_attention",
    fn=attention,
    guarantee=on_cuda_with("transformer_engine", Guarantee.NONE),
    dtypes=frozenset({torch.bfloat16}),
    why="cuDNN's default backward adds the gradients of queries by atomics.",
    sources=_SOURCES,
    outside=Outside(package="transformer_engine", load=_package, switch=_SWITCH),
    head_widths=_WIDTHS,
)
DETERMINISTIC = Variant(
    name="te_attention_deterministic",
    fn=attention,
    guarantee=on_cuda_with("transformer_engine", Guarantee.RUN_TO_RUN),
    dtypes=frozenset({torch.bfloat16}),
    why="Only kernels with a backward of fixed order may be taken: cuDNN's deterministic one.",
    sources=_SOURCES,
    outside=Outside(package="transformer_engine", load=_package, at_least="2.20.2", switch=_SWITCH, deterministic=True),
    head_widths=_WIDTHS,
)
