"""GroupedMLP: all experts of a rank as one stacked weight per projection, over rows sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.node import Node
from megatron.core.contracts.param_spec import Initial, LogicalShard, ParamSpec, expert_shard
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import add_weight_grad
from megatron.core.tensor_parallel.parameter import create_parameter
from megatron.core.tensor_parallel.recompute import keeping
from megatron.core.transformer.mlp import first_projection


def local_expert_ids(num_experts: int, context: ModelContext) -> range:
    """Global ids of the experts of this rank."""
    ep = context.groups.ep
    count = num_experts // ep.size
    return range(ep.rank * count, (ep.rank + 1) * count)


class _GroupedLinear(Node):
    @staticmethod
    def forward(
        ctx: Any, rows_RX: torch.Tensor, weight_EYX: ModelParameter, ends_E: torch.Tensor, context: ModelContext
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_RX, ends_E)
        ctx.weight, ctx.ops = weight_EYX, context.ops
        return context.ops["grouped_gemm"](rows_RX, weight_EYX.detach(), ends_E)

    @staticmethod
    def backward(ctx: Any, dy_RY: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows_RX, ends_E = ctx.saved_tensors
        dy_RY, add = dy_RY.contiguous(), ctx.ops["grouped_grad"]
        dx_RX = dweight_EYX = None
        if ctx.needs_input_grad[0]:
            dx_RX = ctx.ops["grouped_gemm"](dy_RY, ctx.weight.detach(), ends_E, transposed=True)
        if ctx.needs_input_grad[1]:
            dweight_EYX = add_weight_grad(ctx.weight, lambda main_grad_EYX: add(main_grad_EYX, dy_RY, rows_RX, ends_E))
        return dx_RX, dweight_EYX, None, None


class _AddExpertBias(Node):
    """``y[r] + weight[r] * bias[expert of r]``, in fp32, rounded once. An expert's bias gradient is torch's fp32 sum
    over that expert's rows alone, so other experts' rows cannot change its bits; the host waits for their number."""

    @staticmethod
    def forward(
        ctx: Any, y_RF: torch.Tensor, bias_EF: ModelParameter, weight_R: torch.Tensor | None, ends_E: torch.Tensor
    ) -> torch.Tensor:
        repeats = ends_E.diff(prepend=ends_E.new_zeros(1))
        bias_RF = bias_EF.detach().float().repeat_interleave(repeats, dim=0, output_size=y_RF.shape[0])
        ctx.save_for_backward(bias_RF if weight_R is not None else None, weight_R, repeats)
        ctx.bias = bias_EF
        weighted_RF = bias_RF if weight_R is None else bias_RF * weight_R.unsqueeze(1)
        return (y_RF.float() + weighted_RF).to(y_RF.dtype)

    @staticmethod
    def backward(ctx: Any, dy_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None]:
        bias_RF, weight_R, counts_E = ctx.saved_tensors
        wide_RF = dy_RF.float()
        dweight_R = None if weight_R is None else (wide_RF * bias_RF).sum(dim=1)
        scaled_RF = wide_RF if weight_R is None else wide_RF * weight_R.unsqueeze(1)
        sums_EF = torch.stack([rows.sum(dim=0) for rows in scaled_RF.split(counts_E.tolist())])
        return dy_RF, add_weight_grad(ctx.bias, lambda main_grad_EF: main_grad_EF.add_(sums_EF)), dweight_R, None


class GroupedLinear(torch.nn.Module):
    """``y = x W_e^T`` (``+ weight * b_e``) for rows sorted by expert e.

    ``weight`` has the global name ``<name>.weight`` and global shape ``[E, rows, columns]``; this rank holds its
    experts' slices, each cut along ``dim`` over the expert-tensor ranks. An expert without rows gets a zero gradient.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        dim: int,
        config: TransformerConfig,
        context: ModelContext,
        *,
        init_std: float,
        parts: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        etp, ids = context.groups.etp, local_expert_ids(shape[0], context)
        spec = ParamSpec(
            name=f"{name}.weight",
            shape=shape,
            num_shards=shape[0] * etp.size,
            shards=tuple(expert_shard(shape, e, dim, etp.rank, etp.size, parts) for e in ids),
            initial=Initial(kind="normal", a=init_std),
            expert=True,
        )
        self.weight = create_parameter(spec, context)
        self.bias = None
        if config.add_bias_linear:
            if etp.size > 1:
                raise ValueError(f"{name}: expert biases need an expert-tensor-parallel size of 1, it is {etp.size}")
            width = shape[1]
            shards = tuple(LogicalShard(index=e, boxes=(((e, e + 1), (0, width)),), dim=1) for e in ids)
            bias = ParamSpec(
                name=f"{name}.bias",
                shape=shape[:2],
                num_shards=shape[0],
                shards=shards,
                initial=Initial(kind="constant", a=0.0),
                expert=True,
                weight_decay=False,
            )
            self.bias = create_parameter(bias, context)

    def forward(
        self, rows_RX: torch.Tensor, ends_E: torch.Tensor, weight_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the class; ``ends_E`` (int32) says where the rows of each local expert end."""
        y_RY = _GroupedLinear.apply(rows_RX, self.weight, ends_E, self.context)
        return y_RY if self.bias is None else _AddExpertBias.apply(y_RY, self.bias, weight_R, ends_E)


class GroupedMLP(torch.nn.Module):
    """``fc2_e(weight * activation(fc1_e(x)))`` for rows sorted by expert; under expert-tensor parallelism a partial
    sum, which the dispatcher adds up at the token. Inputs and outputs are as wide as the residual stream, or as
    ``moe_latent_size``."""

    def __init__(self, name: str, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        experts, ffn_size = config.num_moe_experts, config.moe_ffn_hidden_size
        hidden = config.moe_latent_size or config.hidden_size
        rows, parts = first_projection(config, ffn_size)
        self.linear_fc1 = GroupedLinear(
            f"{name}.linear_fc1",
            (experts, rows, hidden),
            1,
            config,
            context,
            init_std=config.init_method_std,
            parts=parts,
        )
        self.linear_fc2 = GroupedLinear(
            f"{name}.linear_fc2",
            (experts, hidden, ffn_size),
            2,
            config,
            context,
            init_std=config.output_init_std,
        )
        self._kind, self._activation = config.activation, context.ops["activation"]
        self._recomputes_activation = config.recomputes("moe_act")

    def forward(self, rows_RH: torch.Tensor, weight_R: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Outputs ``[R, H]``; ``weight_R`` is the routing weight of each row."""
        inner_RF = self.linear_fc1(rows_RH, ends_E)
        active_RF = self._active(inner_RF, weight_R)
        with keeping(self._active, active_RF, inner_RF, weight_R, wanted=self._recomputes_activation):
            return self.linear_fc2(active_RF, ends_E, weight_R)

    def _active(self, inner_RF: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
        return self._activation(inner_RF, self._kind, weight_R)
