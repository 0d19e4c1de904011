"""Gradient of the cross entropy for a vocabulary shard."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.cross_entropy_grad import deterministic, reference
from megatron.core.ops.cross_entropy_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.cross_entropy_grad.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
