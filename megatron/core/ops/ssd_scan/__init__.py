"""State-space duality: the selective scan of Mamba-2, in chunks."""

from __future__ import annotations

from megatron.core.ops.registry import Op
from megatron.core.ops.ssd_scan import reference
from megatron.core.ops.ssd_scan.spec import SPEC

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
