"""What a router's balancing losses are made of: normalised scores and choices, summed over tokens."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.router_balance import reference
from megatron.core.ops.router_balance.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(*variants_needing("triton", "megatron.core.ops.router_balance.deterministic_triton"), reference.VARIANT),
)
