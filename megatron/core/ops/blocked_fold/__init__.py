"""Fixed-order sum of equally long contributions, the heart of every ordered reduction."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.blocked_fold.reference import VARIANT
from megatron.core.ops.blocked_fold.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.blocked_fold.deterministic_triton"), VARIANT)
)
