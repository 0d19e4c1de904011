"""Choice of experts by score, with a stated rule for ties."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.router_topk import reference
from megatron.core.ops.router_topk.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(*variants_needing("triton", "megatron.core.ops.router_topk.deterministic_triton"), reference.VARIANT),
)
