"""Dropout whose mask is a function of a key and global element indices."""

from __future__ import annotations

from megatron.core.ops.dropout import reference
from megatron.core.ops.dropout.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
