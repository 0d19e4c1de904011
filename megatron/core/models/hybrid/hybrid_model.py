"""HybridChunk: the consecutive layers of one pipeline chunk with what stands at the model's ends."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.contracts.stage import BalancedRouter
from megatron.core.models.hybrid.hybrid_block import HybridBlock
from megatron.core.models.hybrid.hybrid_embedding import HybridEmbedding
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    Segment,
    assign_segments,
    parse_pattern,
)
from megatron.core.models.hybrid.hybrid_layer_specs import HybridStackSpec, hybrid_stack_spec
from megatron.core.tensor_parallel.column import ColumnParallelLinear
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.router import TopKRouter


def masked_loss(
    token_loss_SB: torch.Tensor, loss_mask_BS: torch.Tensor, microbatch: Microbatch, report: StageReport
) -> torch.Tensor:
    """Sum of unmasked token losses / their number / number of micro-batches; 0 where every token is masked.

    Sum and number go into the report. The sum is torch's fp32 sum over a micro-batch's tokens, whose order depends on
    their number and the device alone.
    """
    mask_SB = loss_mask_BS.t()
    loss_sum = (token_loss_SB * mask_SB).sum()
    num_tokens = mask_SB.to(torch.int64).sum()
    report.loss_sum, report.num_tokens = loss_sum.detach(), num_tokens
    return loss_sum / num_tokens.clamp(min=1).to(torch.float32) / microbatch.num_microbatches


class HybridChunk(torch.nn.Module):
    """One chunk; implements ``contracts.stage.Stage``.

    The first one holds the embedding, the last one the final norm and the output layer. Between chunks travels the
    residual stream: ``[S, B, H]``, under sequence parallelism this rank's ``[S / TP, B, H]``.
    """

    def __init__(
        self,
        segment: Segment,
        config: TransformerConfig,
        context: ModelContext,
        vocab_size: int,
        spec: HybridStackSpec,
    ) -> None:
        super().__init__()
        self.config, self.context, self.vocab_size, self.segment = config, context, vocab_size, segment
        self.is_first, self.is_last = segment.is_first, segment.is_last
        self.embedding = HybridEmbedding("embedding", config, context) if segment.is_first else None
        self.decoder = HybridBlock(segment, config, context, spec)
        self.output_layer = (
            ColumnParallelLinear(
                "output_layer",
                config.hidden_size,
                context.layout.padded_vocab_size,
                context,
                init_std=config.init_method_std,
            )
            if segment.is_last
            else None
        )

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        """As ``Stage.forward``."""
        report = StageReport()
        x_SBH = self.embedding(batch, microbatch) if self.embedding is not None else activation.view_as(activation)
        x_SBH = self.decoder(x_SBH, microbatch, report)
        self._complete(report)
        if self.output_layer is None:
            return x_SBH, report
        logits_SBV = self.output_layer(x_SBH)
        labels_SB = batch.labels_BS.t()
        token_loss_T = vocab_parallel_cross_entropy(
            logits_SBV.flatten(0, 1), labels_SB.reshape(-1), self.vocab_size, self.context
        )
        return masked_loss(token_loss_T.view(labels_SB.shape), batch.loss_mask_BS, microbatch, report), report

    def _complete(self, report: StageReport) -> None:
        """Under sequence parallelism a rank's per-layer values cover its own positions: add the ranks' values up, all
        layers in one go."""
        places = [(name, layer) for name, values in report.per_layer.items() for layer in values]
        if not places or not self.context.cuts_sequence:
            return
        partial = torch.stack([report.per_layer[name][layer] for name, layer in places])
        whole = self.context.sums.all_reduce(self.context.groups.tp, partial)
        for (name, layer), value in zip(places, whole.unbind(), strict=True):
            report.per_layer[name][layer] = value

    def boundary_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        """Shape of the residual stream on this rank."""
        ranks = self.context.groups.tp.size if self.context.cuts_sequence else 1
        return (seq_length // ranks, micro_batch_size, self.config.hidden_size)

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Type of the residual stream."""
        return torch.float32 if self.config.fp32_residual_connection else self.context.params_dtype

    def model_parameters(self) -> Iterator[ModelParameter]:
        """The chunk's parameters in registration order."""
        for param in self.parameters():
            if isinstance(param, ModelParameter):
                yield param

    def balanced_routers(self) -> Iterator[BalancedRouter]:
        """The chunk's routers that have an expert bias, in layer order."""
        for module in self.modules():
            if isinstance(module, TopKRouter) and module.has_bias:
                yield module


def build_hybrid_chunks(
    config: TransformerConfig, context: ModelContext, vocab_size: int, spec: HybridStackSpec = hybrid_stack_spec
) -> list[HybridChunk]:
    """This pipeline rank's chunks in order of virtual stage (segment ``vp * PP + pp``), parameters drawn.

    ``config`` is resolved: nothing left ``None`` that its text promises a default for. ``vocab_size`` is the true
    vocabulary; the padded one is part of the logical layout.

    Raises:
        ConfigError: the pattern cannot be parsed or cut into this many stages.
        ValueError: the shape does not fit the layout, or asks for tied weights or multi-token prediction, which are not
            built yet; a command line is refused for the same reasons earlier, with the flags to change.
    """
    pattern, pp = parse_pattern(config.hybrid_layer_pattern), context.groups.pp
    if pattern.mtp or not config.untie_embeddings_and_output_weights:
        raise ValueError("multi-token prediction and tied embedding and output weights are not built yet")
    segments = assign_segments(pattern, pp.size)
    return [HybridChunk(s, config, context, vocab_size, spec) for s in segments if s.pp_rank == pp.rank]
