"""Rows of a table by id."""

from __future__ import annotations

from megatron.core.ops.embedding import reference
from megatron.core.ops.embedding.spec import SPEC
from megatron.core.ops.registry import Op

OP = Op(spec=SPEC, variants=(reference.VARIANT,))
