"""Rotary position embedding."""

from __future__ import annotations

from megatron.core.ops.registry import Op
from megatron.core.ops.rope import reference
from megatron.core.ops.rope.spec import SPEC

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
