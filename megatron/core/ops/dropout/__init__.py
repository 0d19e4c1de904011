"""Dropout whose mask is a function of a key and global element indices."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.dropout import deterministic, reference
from megatron.core.ops.dropout.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.dropout.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
