"""Norm weights and the linear layer that normalises its input first, as most layers of a hybrid model begin."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.param_spec import Initial
from megatron.core.contracts.parameter import ModelParameter, use_in_fp32
from megatron.core.tensor_parallel.column import ColumnParallelLinear
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.parameter import create_parameter, replicated_spec
from megatron.core.tensor_parallel.recompute import keeping


class Normalizer:
    """RMSNorm or LayerNorm over the last dimension, as the configuration says; holds no parameters."""

    def __init__(self, config: TransformerConfig, context: ModelContext) -> None:
        self.has_bias = config.normalization == "LayerNorm"
        self.epsilon = config.layernorm_epsilon
        self.dtype = context.params_dtype
        self._op = context.ops["layer_norm" if self.has_bias else "rms_norm"]

    def create(
        self, name: str, size: int, context: ModelContext, *, per_head: bool = False, decay: bool = False
    ) -> tuple[ModelParameter, ModelParameter | None]:
        """``<name>weight`` of ones and, for LayerNorm, ``<name>bias`` of zeros; ``name`` ends in its separator.

        ``per_head``: it normalises single heads, of which every tensor-parallel rank has its own, so that the gradients
        of the copies are partial in any case.
        """
        facts = {"weight_decay": decay, "partial": per_head and context.groups.tp.size > 1}
        ones, zeros = Initial(kind="constant", a=1.0), Initial(kind="constant", a=0.0)
        weight = create_parameter(replicated_spec(f"{name}weight", (size,), ones, context, **facts), context)
        if not self.has_bias:
            return weight, None
        return weight, create_parameter(replicated_spec(f"{name}bias", (size,), zeros, context, **facts), context)

    def __call__(self, x: torch.Tensor, weight: ModelParameter, bias: ModelParameter | None) -> torch.Tensor:
        """Normalised ``x`` in the activation type; ``x`` may be an fp32 residual."""
        if bias is None:
            return self._op(x, use_in_fp32(weight), self.epsilon).to(self.dtype)
        return self._op(x, use_in_fp32(weight), use_in_fp32(bias), self.epsilon).to(self.dtype)


class NormColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` of the normalised input. Under sequence parallelism each rank normalises its own
    positions before they are gathered."""

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        config: TransformerConfig,
        context: ModelContext,
        *,
        bias: bool = False,
        parts: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(
            name, input_size, output_size, context, init_std=config.init_method_std, bias=bias, parts=parts
        )
        self._normalize = Normalizer(config, context)
        self._recomputes_norm = config.recomputes("layernorm")
        self.layer_norm_weight, self.layer_norm_bias = self._normalize.create(
            f"{name}.layer_norm_", input_size, context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        normal = self._normalized(x)
        with keeping(self._normalized, normal, x, wanted=self._recomputes_norm):
            return super().forward(normal)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x, self.layer_norm_weight, self.layer_norm_bias)
