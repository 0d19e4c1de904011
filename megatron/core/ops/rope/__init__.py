"""Rotary position embedding."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.rope import reference
from megatron.core.ops.rope.spec import SPEC

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.rope.deterministic_triton"), reference.VARIANT)
)
