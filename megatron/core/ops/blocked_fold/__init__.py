"""Fixed-order sum of equally long contributions, the heart of every ordered reduction."""

from megatron.core.ops.blocked_fold.reference import VARIANT
from megatron.core.ops.blocked_fold.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(VARIANT,))
