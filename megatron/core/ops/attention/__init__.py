"""Causal attention with grouped keys and values."""

from __future__ import annotations

from megatron.core.ops.attention import (
    deterministic,
    deterministic_cudnn,
    deterministic_torch_flash,
    reference,
    te_attention,
)
from megatron.core.ops.attention.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        deterministic_cudnn.VARIANT,
        deterministic_torch_flash.VARIANT,
        deterministic.VARIANT,
        te_attention.DETERMINISTIC,
        te_attention.VARIANT,
        reference.VARIANT,
    ),
)
