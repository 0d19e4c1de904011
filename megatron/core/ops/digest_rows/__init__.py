"""Digests by row that traces hold, in one launch."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.digest_rows.reference import VARIANT
from megatron.core.ops.digest_rows.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.digest_rows.deterministic_triton"), VARIANT)
)
