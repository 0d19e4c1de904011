"""Copies of tokens laid out by expert."""

from __future__ import annotations

from megatron.core.ops.moe_permute import reference
from megatron.core.ops.moe_permute.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
