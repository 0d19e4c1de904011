"""Gradient of the cross entropy for a vocabulary shard."""

from __future__ import annotations

from megatron.core.ops.cross_entropy_grad import reference
from megatron.core.ops.cross_entropy_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
