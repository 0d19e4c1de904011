"""Products of rows with their expert's weight."""

from __future__ import annotations

from megatron.core.ops.grouped_gemm import deterministic_torch_grouped, reference, te_grouped
from megatron.core.ops.grouped_gemm.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(
    spec=SPEC,
    variants=(deterministic_torch_grouped.VARIANT, te_grouped.VARIANT, reference.VARIANT),
)
