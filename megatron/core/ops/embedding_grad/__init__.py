"""Gradient of an embedding, added into the main gradient in the order of positions."""

from __future__ import annotations

from megatron.core.ops.embedding_grad import reference
from megatron.core.ops.embedding_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
