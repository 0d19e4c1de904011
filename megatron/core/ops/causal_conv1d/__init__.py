"""Depthwise causal convolution over the sequence, then SiLU."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.causal_conv1d import deterministic, package_causal_conv1d, reference
from megatron.core.ops.causal_conv1d.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.causal_conv1d.deterministic_triton"),
        deterministic.VARIANT,
        package_causal_conv1d.DETERMINISTIC,
        package_causal_conv1d.VARIANT,
        reference.VARIANT,
    ),
)
