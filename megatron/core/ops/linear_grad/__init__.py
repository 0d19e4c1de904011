"""Weight gradient of a linear layer, added into the main gradient."""

from __future__ import annotations

from megatron.core.ops.linear_grad import apex, deterministic, deterministic_torch_addmm, reference
from megatron.core.ops.linear_grad.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(
        deterministic_torch_addmm.VARIANT,
        deterministic.VARIANT,
        apex.VARIANT,
        reference.VARIANT,
    ),
)
