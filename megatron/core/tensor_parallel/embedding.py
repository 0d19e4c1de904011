"""VocabParallelEmbedding: the rows of the padded vocabulary are cut over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.contracts.param_spec import Initial
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import add_weight_grad
from megatron.core.tensor_parallel.mappings import leave_tp
from megatron.core.tensor_parallel.parameter import Stages, create_parameter, cut_spec


class _Lookup(Node):
    @staticmethod
    def forward(
        ctx: Any, weight_VH: ModelParameter, ids_T: torch.Tensor, context: ModelContext, stage: str
    ) -> torch.Tensor:
        ctx.save_for_backward(ids_T)
        ctx.weight, ctx.add, ctx.stage = weight_VH, context.ops["embedding_grad"], stage
        return context.ops["embedding"](weight_VH.detach(), ids_T)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (ids_T,) = ctx.saved_tensors
        grad_TH = grad_TH.contiguous()
        return (
            add_weight_grad(ctx.weight, lambda main_grad_VH: ctx.add(main_grad_VH, grad_TH, ids_T), ctx.stage),
            None,
            None,
            None,
        )


def lookup(weight: ModelParameter, ids_T: torch.Tensor, context: ModelContext, stage: str = "") -> torch.Tensor:
    """Rows ``[T, H]`` of this rank's part of a table; ids outside it give zero rows and no gradient.

    The gradient of a row adds its tokens in the order of ``ids_T``.
    """
    return _Lookup.apply(weight, ids_T, context, stage)


class VocabParallelEmbedding(torch.nn.Module):
    """Rows of ``weight [V padded, H]`` by token id.

    Returns the residual stream's form ``[S, B, H]``, or this rank's ``[S / TP, B, H]`` under sequence parallelism. A
    row lies on one rank and is zero on the others, so the sum over ranks is exact. The gradient of a row adds its
    tokens in position order, (s, b) row-major. With ``two_stage`` the weight is used at both ends of the pipeline, and
    every use says at which.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        context: ModelContext,
        *,
        init_std: float,
        weight_decay: bool = True,
        two_stage: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        shape = (context.layout.padded_vocab_size, hidden_size)
        initial = Initial(kind="normal", a=init_std)
        stages: Stages = ("first", "last") if two_stage else ()
        spec = cut_spec(f"{name}.weight", shape, 0, initial, context, weight_decay=weight_decay, stages=stages)
        self.weight = create_parameter(spec, context)
        self._first_row = self.weight.shape[0] * context.groups.tp.rank

    def forward(self, tokens_BS: torch.Tensor, stage: str = "") -> torch.Tensor:
        """See the class; ``stage`` names the main-gradient buffer that this use adds into."""
        ids_SB = tokens_BS.t() - self._first_row
        rows_TH = lookup(self.weight, ids_SB.reshape(-1), self.context, stage)
        return leave_tp(rows_TH.view(*ids_SB.shape, -1), self.context)
