"""Exact accumulation of squares for a norm that no layout changes."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.norm_blocks.reference import VARIANT
from megatron.core.ops.norm_blocks.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.norm_blocks.deterministic_triton"), VARIANT)
)
