"""A token's choices of experts as a row with one place per expert."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.router_table import reference
from megatron.core.ops.router_table.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(*variants_needing("triton", "megatron.core.ops.router_table.deterministic_triton"), reference.VARIANT),
)
