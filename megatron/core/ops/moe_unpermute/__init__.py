"""Sum of a token's expert rows."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.moe_unpermute import deterministic, reference
from megatron.core.ops.moe_unpermute.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.moe_unpermute.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
