"""MLP: two projections around an activation, cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.tensor_parallel.column import ColumnParallelLinear
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.norm import NormColumnParallelLinear
from megatron.core.tensor_parallel.row import RowParallelLinear


def first_projection(config: TransformerConfig, ffn_size: int) -> tuple[int, tuple[int, ...]]:
    """Rows of the first projection and their parts: with SwiGLU gate then up, each cut by itself."""
    parts = (ffn_size, ffn_size) if config.activation == "swiglu" else (ffn_size,)
    return sum(parts), parts


class MLP(torch.nn.Module):
    """``fc2(activation(fc1(x)))`` over the residual stream's form.

    With ``normalize`` the input is normalised first, by a weight fused into ``linear_fc1``.
    """

    def __init__(
        self,
        name: str,
        ffn_size: int,
        config: TransformerConfig,
        context: ModelContext,
        *,
        normalize: bool = True,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        self._kind, self._op = config.activation, context.ops["activation"]
        bias = config.add_bias_linear if bias is None else bias
        hidden, (rows, parts) = config.hidden_size, first_projection(config, ffn_size)
        if normalize:
            self.linear_fc1: ColumnParallelLinear = NormColumnParallelLinear(
                f"{name}.linear_fc1", hidden, rows, config, context, bias=bias, parts=parts
            )
        else:
            self.linear_fc1 = ColumnParallelLinear(
                f"{name}.linear_fc1", hidden, rows, context, init_std=config.init_method_std, bias=bias, parts=parts
            )
        self.linear_fc2 = RowParallelLinear(
            f"{name}.linear_fc2", ffn_size, hidden, context, init_std=config.output_init_std, bias=bias
        )

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The layer's contribution to the residual stream."""
        inner_SBF = self.linear_fc1(x_SBH)
        active_RF = self._op(inner_SBF.flatten(0, 1), self._kind, None)
        return self.linear_fc2(active_RF.view(*inner_SBF.shape[:2], -1))
