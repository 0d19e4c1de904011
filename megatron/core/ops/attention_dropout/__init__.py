"""Causal attention with dropout on its weights."""

from __future__ import annotations

from megatron.core.ops.attention_dropout import deterministic, reference
from megatron.core.ops.attention_dropout.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(deterministic.VARIANT, reference.VARIANT))
