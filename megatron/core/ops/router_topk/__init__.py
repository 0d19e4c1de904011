"""Choice of experts by score, with a stated rule for ties."""

from __future__ import annotations

from megatron.core.ops.registry import Op
from megatron.core.ops.router_topk import reference
from megatron.core.ops.router_topk.spec import SPEC

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
