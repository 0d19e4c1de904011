"""Depthwise causal convolution over the sequence, then SiLU."""

from __future__ import annotations

from megatron.core.ops.causal_conv1d import reference
from megatron.core.ops.causal_conv1d.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
