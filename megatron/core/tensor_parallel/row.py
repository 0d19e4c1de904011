"""RowParallelLinear: the input features are cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from megatron.core.contracts.param_spec import Initial
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import add_bias, linear
from megatron.core.tensor_parallel.mappings import reduce_from_tp
from megatron.core.tensor_parallel.parameter import create_parameter, cut_spec, replicated_spec


class RowParallelLinear(torch.nn.Module):
    """``y = x W^T + b`` with ``W [output_size, input_size]`` cut along its columns.

    Takes ``[S, B, input_size / TP]``; the ranks' partial products are added in fp32 in rank order, rounded once, and
    returned in the residual stream's form: replicated, or this rank's positions under sequence parallelism. The bias
    is added after the sum, by every rank to what it holds.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        context: ModelContext,
        *,
        init_std: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        weight = Initial(kind="normal", a=init_std)
        self.weight = create_parameter(
            cut_spec(f"{name}.weight", (output_size, input_size), 1, weight, context), context
        )
        zeros = Initial(kind="constant", a=0.0)
        self.bias = (
            create_parameter(replicated_spec(f"{name}.bias", (output_size,), zeros, context), context) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scatter = self.context.cuts_sequence
        y = linear(x, self.weight, self.context, scatter=scatter)
        return add_bias(y if scatter else reduce_from_tp(y, self.context), self.bias)
