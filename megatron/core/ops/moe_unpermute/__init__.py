"""Sum of a token's expert rows."""

from __future__ import annotations

from megatron.core.ops.moe_unpermute import reference
from megatron.core.ops.moe_unpermute.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
