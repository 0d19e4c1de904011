"""RMSNorm over the last dimension."""

from __future__ import annotations

from megatron.core.ops.registry import Op
from megatron.core.ops.rms_norm import reference
from megatron.core.ops.rms_norm.spec import SPEC

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
