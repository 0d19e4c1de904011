"""Multi-token prediction: behind the trunk, a small stack of layers for every token beyond the next one.

Depth d (from 1) reads the depth before it (the trunk's normalised output for the first) and the embeddings of the
tokens d places ahead, and predicts the token behind those. Depths have weights of their own, or share one block.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.models.hybrid.hybrid_block import LayerStack
from megatron.core.models.hybrid.hybrid_layer_specs import HybridStackSpec
from megatron.core.tensor_parallel.column import ColumnParallelLinear
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.mappings import columns_to_residual
from megatron.core.transformer.norm import Norm


class PredictionBlock(torch.nn.Module):
    """``final_layernorm(layers(eh_proj([enorm(embeddings); hnorm(hidden)])))``.

    ``layer`` is the number of its first layer in noise and reports; parameter names count from 0 in each block.
    """

    def __init__(
        self,
        name: str,
        symbols: str,
        layer: int,
        config: TransformerConfig,
        context: ModelContext,
        spec: HybridStackSpec,
    ) -> None:
        super().__init__()
        self._context = context
        self._dtype = torch.float32 if config.fp32_residual_connection else context.params_dtype
        self.enorm = Norm(f"{name}.enorm", config, context)
        self.hnorm = Norm(f"{name}.hnorm", config, context)
        hidden, std = config.hidden_size, config.init_method_std
        self.eh_proj = ColumnParallelLinear(f"{name}.eh_proj", 2 * hidden, hidden, context, init_std=std)
        self.mtp_model_layer = LayerStack(
            f"{name}.mtp_model_layer", symbols, config, context, spec, first_key=0, first_layer=layer
        )
        self.final_layernorm = Norm(f"{name}.final_layernorm", config, context)

    def forward(
        self, x_SBH: torch.Tensor, ahead_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport
    ) -> torch.Tensor:
        """Normalised output in the residual stream's form; ``ahead_SBH`` are the embeddings."""
        joined_SBX = torch.cat((self.enorm(ahead_SBH), self.hnorm(x_SBH)), dim=-1)
        out_SBH = columns_to_residual(self.eh_proj(joined_SBX), self._context).to(self._dtype)
        return self.final_layernorm(self.mtp_model_layer(out_SBH, microbatch, report))


class MultiTokenPrediction(torch.nn.Module):
    """The blocks of all depths; ``symbols`` are the layers of one. ``mtp_use_repeated_layer`` makes it one block."""

    def __init__(
        self, name: str, symbols: str, config: TransformerConfig, context: ModelContext, spec: HybridStackSpec
    ) -> None:
        super().__init__()
        self.depths, self.repeated = config.prediction_depths, config.mtp_use_repeated_layer
        self.layers = torch.nn.ModuleDict()
        for block in range(1 if self.repeated else self.depths):
            first = config.num_layers + block * len(symbols)
            self.layers[str(block)] = PredictionBlock(f"{name}.layers.{block}", symbols, first, config, context, spec)

    def forward(
        self,
        x_SBH: torch.Tensor,
        ahead_SBH: torch.Tensor,
        depth: int,
        microbatch: Microbatch,
        report: StageReport,
    ) -> torch.Tensor:
        """Normalised output of depth ``depth`` (from 1); ``x_SBH`` is that of the depth before."""
        if not self.repeated:
            return self.layers[str(depth - 1)](x_SBH, ahead_SBH, microbatch, report)
        use = dataclasses.replace(microbatch, application=depth - 1, applications=self.depths)
        return self.layers["0"](x_SBH, ahead_SBH, use, report)
