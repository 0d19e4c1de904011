"""Exact accumulation of squares for a norm that no layout changes."""

from __future__ import annotations

from megatron.core.ops.norm_blocks import reference
from megatron.core.ops.norm_blocks.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
