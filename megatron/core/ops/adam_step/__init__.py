"""One AdamW step on flat fp32 pieces."""

from __future__ import annotations

from megatron.core.ops.adam_step import deterministic, reference
from megatron.core.ops.adam_step.spec import SPEC
from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.adam_step.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
