"""What a vocabulary shard contributes to the cross entropy of each token."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.cross_entropy_stats import deterministic, reference
from megatron.core.ops.cross_entropy_stats.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.cross_entropy_stats.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
