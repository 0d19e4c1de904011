"""The digest of a tensor's bytes that traces hold, in one launch."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.digest_words.reference import VARIANT
from megatron.core.ops.digest_words.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.digest_words.deterministic_triton"), VARIANT)
)
