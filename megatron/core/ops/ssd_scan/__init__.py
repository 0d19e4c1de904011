"""State-space duality: the selective scan of Mamba-2, in chunks."""

from __future__ import annotations

from megatron.core.ops.availability import variants_needing
from megatron.core.ops.registry import Op
from megatron.core.ops.ssd_scan import deterministic, mamba_ssm, reference
from megatron.core.ops.ssd_scan.spec import SPEC

OP = Op(
    spec=SPEC,
    variants=(
        *variants_needing("triton", "megatron.core.ops.ssd_scan.deterministic_triton"),
        deterministic.VARIANT,
        mamba_ssm.DETERMINISTIC,
        mamba_ssm.VARIANT,
        reference.VARIANT,
    ),
)
