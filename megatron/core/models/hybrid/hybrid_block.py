"""The stack of layers of one pipeline chunk."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.models.hybrid.hybrid_layer_allocation import Segment
from megatron.core.models.hybrid.hybrid_layer_specs import HybridStackSpec, LayerSpec
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.recompute import keeping, run_again
from megatron.core.transformer.dropout import ResidualDropout
from megatron.core.transformer.norm import Norm


class HybridLayer(torch.nn.Module):
    """``x + dropout(sublayer(norm(x)))``; ``layer`` is the global 0-based number."""

    def __init__(
        self, name: str, layer: int, spec: LayerSpec, config: TransformerConfig, context: ModelContext
    ) -> None:
        super().__init__()
        self._pre_norm, self._slot = spec.pre_norm, spec.slot
        if spec.pre_norm is not None:
            self.add_module(spec.pre_norm, Norm(f"{name}.{spec.pre_norm}", config, context))
        self.add_module(spec.slot, spec.build(f"{name}.{spec.slot}", layer, config, context))
        self._dropout = ResidualDropout(config.hidden_dropout, context, layer, "residual")
        self._recomputes_norm = config.recomputes("layernorm")
        self._recomputes = spec.recompute is not None and config.recomputes(spec.recompute)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The residual stream behind this layer, in the type it came in."""
        norm = None if self._pre_norm is None else self._modules[self._pre_norm]
        sublayer = self._modules[self._slot]
        run = functools.partial(run_again, sublayer) if self._recomputes else sublayer
        if norm is None:
            out_SBH = run(x_SBH, microbatch, report)
        else:
            inner_SBH = norm(x_SBH)
            with keeping(norm, inner_SBH, x_SBH, wanted=self._recomputes_norm):
                out_SBH = run(inner_SBH, microbatch, report)
        return x_SBH + self._dropout(out_SBH, microbatch)


def recomputed_layers(config: TransformerConfig, count: int) -> list[tuple[int, int]]:
    """(start, stop) of each run of layers that are recomputed together: the first ones of ``count`` layers."""
    if config.recompute_granularity != "full":
        return []
    size, last = config.recompute_num_layers or 1, count
    if config.recompute_method == "block":
        size, last = 1, min(count, size)
    return [(start, min(start + size, last)) for start in range(0, last, size)]


def _run(
    layers: Sequence[torch.nn.Module], x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport
) -> torch.Tensor:
    for layer in layers:
        x_SBH = layer(x_SBH, microbatch, report)
    return x_SBH


class LayerStack(torch.nn.Module):
    """Consecutive layers, one per symbol.

    ``layers`` is keyed from ``first_key`` on, so that module paths are the parameters' global names on every stage;
    noise and reports call the same layers ``first_layer``, ...
    """

    def __init__(
        self,
        name: str,
        symbols: str,
        config: TransformerConfig,
        context: ModelContext,
        spec: HybridStackSpec,
        *,
        first_key: int,
        first_layer: int,
    ) -> None:
        super().__init__()
        self._again = recomputed_layers(config, len(symbols))
        self.layers = torch.nn.ModuleDict()
        for offset, symbol in enumerate(symbols):
            key = str(first_key + offset)
            self.layers[key] = HybridLayer(f"{name}.layers.{key}", first_layer + offset, spec[symbol], config, context)

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The residual stream behind the layers."""
        layers = list(self.layers.values())
        for start, stop in self._again:
            x_SBH = run_again(functools.partial(_run, layers[start:stop]), x_SBH, microbatch, report)
        kept = self._again[-1][1] if self._again else 0
        return _run(layers[kept:], x_SBH, microbatch, report)


class HybridBlock(LayerStack):
    """The layers of one segment, and behind the model's last one the final norm."""

    def __init__(
        self, segment: Segment, config: TransformerConfig, context: ModelContext, spec: HybridStackSpec
    ) -> None:
        first = segment.first_layer
        super().__init__("decoder", segment.symbols, config, context, spec, first_key=first, first_layer=first)
        self.final_norm = Norm("decoder.final_norm", config, context) if segment.is_last else None

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The residual stream behind the segment; normalised, in the activation type, on the last one."""
        x_SBH = super().forward(x_SBH, microbatch, report)
        return x_SBH if self.final_norm is None else self.final_norm(x_SBH)
