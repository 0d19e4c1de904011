"""RMSNorm per group of a gated value, as Mamba-2 uses it."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.gated_rms_norm import deterministic, reference
from megatron.core.ops.gated_rms_norm.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.gated_rms_norm.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
