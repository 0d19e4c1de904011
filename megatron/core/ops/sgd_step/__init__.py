"""One SGD step on flat fp32 pieces."""

from __future__ import annotations

from megatron.core.ops.registry import Op
from megatron.core.ops.sgd_step import reference
from megatron.core.ops.sgd_step.spec import SPEC

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
