"""One AdamW step of many pieces: masters, moments and working weights in one pass, and their digests if asked for."""

from __future__ import annotations

from megatron.core.ops.adam_pieces import deterministic, reference
from megatron.core.ops.adam_pieces.spec import SPEC
from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.adam_pieces.deterministic_triton"),
        deterministic.VARIANT,
        reference.VARIANT,
    ),
)
