"""ColumnParallelLinear: the output features are cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch

from megatron.core.contracts.param_spec import Initial
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import add_bias, linear
from megatron.core.tensor_parallel.mappings import copy_to_tp
from megatron.core.tensor_parallel.parameter import create_parameter, cut_spec


def project_columns(x: torch.Tensor, weight: ModelParameter, context: ModelContext, stage: str = "") -> torch.Tensor:
    """``x W^T`` from the residual stream's form into a tensor-parallel region, ``weight`` holding this rank's rows;
    ``stage`` as in ``linear``."""
    gather = context.cuts_sequence
    return linear(x if gather else copy_to_tp(x, context), weight, context, gather=gather, stage=stage)


class ColumnParallelLinear(torch.nn.Module):
    """``y = x W^T + b`` with ``W [output_size, input_size]`` cut along its rows.

    Takes the residual stream's form (``[S, B, H]``, or ``[S / TP, B, H]`` under sequence parallelism), returns
    ``[S, B, output_size / TP]``. ``parts`` are sizes of sections of the output; each is cut by itself.

    Raises:
        ValueError: the tensor-parallel size does not divide the output or a part.
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
        parts: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        weight = Initial(kind="normal", a=init_std)
        shape = (output_size, input_size)
        self.weight = create_parameter(cut_spec(f"{name}.weight", shape, 0, weight, context, parts=parts), context)
        zeros = Initial(kind="constant", a=0.0)
        self.bias = (
            create_parameter(cut_spec(f"{name}.bias", (output_size,), 0, zeros, context, parts=parts), context)
            if bias
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return add_bias(project_columns(x, self.weight, self.context), self.bias)
