"""RMSNorm per group of a gated value, as Mamba-2 uses it."""

from __future__ import annotations

from megatron.core.ops.gated_rms_norm import reference
from megatron.core.ops.gated_rms_norm.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
