"""TransformerConfig: everything a model needs to be built, one flat class for users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.attention import AttentionFields
from megatron.core.config.fields import trajectory
from megatron.core.config.mamba import MambaFields
from megatron.core.config.moe import MoEFields
from megatron.core.config.mtp import MTPFields
from megatron.core.config.precision import PrecisionFields
from megatron.core.config.recompute import RecomputeFields


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttentionFields, MambaFields, MoEFields, MTPFields, PrecisionFields, RecomputeFields):
    """Model shape and numerics. ``None`` means "not given" and is gone after ``resolve``, unless the text says so."""

    hybrid_layer_pattern: str | None = trajectory(None)
    """Layers in order: M Mamba-2, * attention, - MLP, E MoE; | cuts pipeline segments, every / part predicts one token
    further."""
    num_layers: int | None = trajectory(None)
    """Number of layers; taken from the pattern when one is given."""
    hidden_size: int | None = trajectory(None)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = trajectory(None)
    """Inner width of an MLP layer; default: 4 * hidden size, or two thirds of it rounded down to 64 with --swiglu."""
    seq_length: int | None = trajectory(None)
    """Tokens per sequence."""
    normalization: Literal["LayerNorm", "RMSNorm"] = trajectory("LayerNorm")
    """Norm before each layer and after the last."""
    layernorm_epsilon: float = trajectory(1e-5, flags=("--norm-epsilon",))
    """Epsilon of the norms."""
    add_bias_linear: bool = trajectory(True, flags=("--disable-bias-linear",), negates=True)
    """Bias in the linear layers of attention and MLP."""
    squared_relu: bool = trajectory(False)
    """Activation relu(x)^2."""
    swiglu: bool = trajectory(False)
    """Activation silu(gate) * up."""
    bias_gelu_fusion: bool = trajectory(True)
    """The tanh form of GELU where there are linear biases, as Megatron's fused kernel computes it. When off,
    the erf form."""
    untie_embeddings_and_output_weights: bool = trajectory(False)
    """Give the output layer a weight of its own."""
    init_method_std: float = trajectory(0.02)
    """Standard deviation of the initial weights; projections back into the residual use it / sqrt(layers)."""
    embedding_init_method_std: float | None = trajectory(None)
    """Standard deviation of the initial embeddings; when given, the embeddings do not decay. Default: as above."""
    calculate_per_token_loss: bool = trajectory(False)
    """Divide the gradient by the unmasked tokens of the global batch instead of each micro-batch by its own."""
    hidden_dropout: float = trajectory(0.1)
    """Dropout probability on embeddings and on each layer's output before the residual addition."""

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the initial weights of projections back into the residual stream. A main part without
        layers, in front of depths of multi-token prediction, counts as one."""
        return self.init_method_std / math.sqrt(self.num_layers or 1)

    @property
    def prediction_depths(self) -> int:
        """Tokens predicted beyond the next one."""
        return self.mtp_num_layers or 0

    @property
    def embeds_on_last_stage(self) -> bool:
        """True where the last pipeline stage uses the token embeddings too: as the output layer's weight, or to read
        the tokens ahead."""
        return not self.untie_embeddings_and_output_weights or self.prediction_depths > 0

    @property
    def activation(self) -> Literal["squared_relu", "swiglu", "gelu_tanh", "gelu"]:
        """Name of the MLP activation in effect."""
        if self.squared_relu:
            return "squared_relu"
        if self.swiglu:
            return "swiglu"
        return "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu"
