"""Copies of tokens laid out by expert."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.moe_permute import deterministic, reference
from megatron.core.ops.moe_permute.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.moe_permute.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
