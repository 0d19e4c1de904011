"""Layout-free digests of many pieces of flat tensors at once: the state of a run in a few launches."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.digest_pieces.reference import VARIANT
from megatron.core.ops.digest_pieces.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC, variants=(*variants_needing("triton", "megatron.core.ops.digest_pieces.deterministic_triton"), VARIANT)
)
