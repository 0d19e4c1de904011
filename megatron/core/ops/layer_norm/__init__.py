"""LayerNorm over the last dimension."""

from __future__ import annotations

from megatron.core.ops.layer_norm import deterministic, reference
from megatron.core.ops.layer_norm.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(deterministic.VARIANT, reference.VARIANT))
