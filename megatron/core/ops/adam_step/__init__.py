"""One AdamW step on flat fp32 pieces."""

from __future__ import annotations

from megatron.core.ops.adam_step import reference
from megatron.core.ops.adam_step.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
