"""The non-linearity of an MLP or expert, with an optional weight per row."""

from __future__ import annotations

from megatron.core.ops.activation import deterministic, reference
from megatron.core.ops.activation.spec import SPEC
from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.activation.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
