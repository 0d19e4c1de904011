"""Gradient of an embedding, added into the main gradient in the order of positions."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.embedding_grad import deterministic_index_add, deterministic_rounds, reference
from megatron.core.ops.embedding_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.embedding_grad.deterministic_triton"),
        deterministic_index_add.VARIANT,
        deterministic_rounds.VARIANT,
        reference.VARIANT,
    ),
)
