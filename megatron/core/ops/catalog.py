"""Every op there is."""

from __future__ import annotations

from megatron.core.ops import blocked_fold
from megatron.core.ops.registry import Op

ALL_OPS: tuple[Op, ...] = (blocked_fold.OP,)
