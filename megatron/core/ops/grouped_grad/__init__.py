"""Weight gradients of expert products, added into the main gradient."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.grouped_grad import deterministic, deterministic_torch_addmm, reference, te_grouped
from megatron.core.ops.grouped_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.grouped_grad.deterministic_triton"),
        deterministic_torch_addmm.VARIANT,
        deterministic.VARIANT,
        te_grouped.VARIANT,
        reference.VARIANT,
    ),
)
