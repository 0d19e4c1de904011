"""Weights of a token's chosen experts from its scores."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.router_weights import deterministic, reference
from megatron.core.ops.router_weights.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.router_weights.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
