"""Weight gradients of expert products, added into the main gradient."""

from __future__ import annotations

from megatron.core.ops.grouped_grad import reference
from megatron.core.ops.grouped_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
