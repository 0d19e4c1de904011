"""RMSNorm over the last dimension."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.rms_norm import deterministic, reference
from megatron.core.ops.rms_norm.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.rms_norm.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
