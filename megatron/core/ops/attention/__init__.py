"""Causal attention with grouped keys and values."""

from __future__ import annotations

from megatron.core.ops.attention import reference
from megatron.core.ops.attention.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
