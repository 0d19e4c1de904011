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
from megatron.core.models.hybrid.hybrid_loss import ahead, masked_sum, mean_of, with_weight
from megatron.core.models.hybrid.hybrid_mtp import MultiTokenPrediction
from megatron.core.tensor_parallel.column import ColumnParallelLinear, project_columns
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.transformer.moe.router import TopKRouter


class HybridChunk(torch.nn.Module):
    """One chunk; implements ``contracts.stage.Stage``.

    The first one holds the embedding, the last one the final norm, the output layer and the blocks that predict further
    tokens; where these read the token embeddings, or share their weight, it holds the table too (``words`` is the one
    that the first chunk of the same rank made). Between chunks travels the residual stream: ``[S, B, H]``, under
    sequence parallelism this rank's ``[S / TP, B, H]``.
    """

    def __init__(
        self,
        segment: Segment,
        config: TransformerConfig,
        context: ModelContext,
        vocab_size: int,
        spec: HybridStackSpec,
        *,
        mtp_symbols: str = "",
        words: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.config, self.context, self.vocab_size, self.segment = config, context, vocab_size, segment
        self.is_first, self.is_last = segment.is_first, segment.is_last
        looks_up = segment.is_first or (segment.is_last and config.embeds_on_last_stage)
        self.embedding = (
            HybridEmbedding("embedding", config, context, positions=segment.is_first, words=words) if looks_up else None
        )
        self.decoder = HybridBlock(segment, config, context, spec)
        self.output_layer = (
            ColumnParallelLinear(
                "output_layer",
                config.hidden_size,
                context.layout.padded_vocab_size,
                context,
                init_std=config.init_method_std,
            )
            if segment.is_last and config.untie_embeddings_and_output_weights
            else None
        )
        self.mtp = (
            MultiTokenPrediction("mtp", mtp_symbols, config, context, spec)
            if segment.is_last and config.prediction_depths
            else None
        )

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        """As ``Stage.forward``."""
        report = StageReport()
        microbatch = with_weight(microbatch, batch, self.config.calculate_per_token_loss)
        x_SBH = self.embedding(batch, microbatch) if self.is_first else activation.view_as(activation)
        x_SBH = self.decoder(x_SBH, microbatch, report)
        out = self._loss(x_SBH, batch, microbatch, report) if self.is_last else x_SBH
        self._complete(report)
        return out, report

    def _token_sums(self, x_SBH: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of unmasked token losses, their number) of the output layer over ``x_SBH``."""
        if self.output_layer is not None:
            logits_SBV = self.output_layer(x_SBH)
        else:
            logits_SBV = project_columns(x_SBH, self.embedding.word_embeddings.weight, self.context, "last")
        labels_SB = batch.labels_BS.t()
        token_loss_T = vocab_parallel_cross_entropy(
            logits_SBV.flatten(0, 1), labels_SB.reshape(-1), self.vocab_size, self.context
        )
        return masked_sum(token_loss_T.view(labels_SB.shape), batch.loss_mask_BS)

    def _loss(self, x_SBH: torch.Tensor, batch: Batch, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The scalar to differentiate; sums and numbers of tokens go into the report.

        Autograd runs the nodes that were made last first, so a weight that trunk and depths share gets the gradient of
        the last depth first and the trunk's last, at every pipeline size.
        """
        loss_sum, num_tokens = self._token_sums(x_SBH, batch)
        report.loss_sum, report.num_tokens = loss_sum.detach(), num_tokens
        per_token = self.config.calculate_per_token_loss
        loss = loss_sum if per_token else mean_of(loss_sum, num_tokens) / microbatch.num_microbatches
        if self.mtp is None or not microbatch.training:
            return loss
        scale = self.config.mtp_loss_scaling_factor / self.mtp.depths
        for depth in range(1, self.mtp.depths + 1):
            further = ahead(batch, depth)
            ahead_SBH = self.embedding.look_ahead(further.tokens_BS, depth, microbatch)
            x_SBH = self.mtp(x_SBH, ahead_SBH, depth, microbatch, report)
            loss_sum, num_tokens = self._token_sums(x_SBH, further)
            report.depths.append((loss_sum.detach(), num_tokens))
            loss = loss + mean_of(loss_sum, num_tokens) * scale * microbatch.weight
        return loss

    def _complete(self, report: StageReport) -> None:
        """Under sequence parallelism a rank's per-layer values cover its own positions: add the ranks' values up, all
        layers in one collective."""
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
        ValueError: the shape does not fit the layout, or the depths of multi-token prediction are not those of the
            pattern; a command line is refused for the same reasons earlier, with the flags to change.
    """
    pattern, pp = parse_pattern(config.hybrid_layer_pattern), context.groups.pp
    if len(pattern.mtp) != config.prediction_depths:
        raise ValueError(
            f"{config.prediction_depths} prediction depths, the pattern has {len(pattern.mtp)} parts for them"
        )
    mtp_symbols = pattern.mtp[0] if pattern.mtp else ""
    chunks: list[HybridChunk] = []
    for segment in assign_segments(pattern, pp.size):
        if segment.pp_rank != pp.rank:
            continue
        # With one pipeline rank both ends are here, and use one table.
        first = chunks[0].embedding if chunks and chunks[0].is_first else None
        words = first.word_embeddings if first is not None and segment.is_last and config.embeds_on_last_stage else None
        chunks.append(HybridChunk(segment, config, context, vocab_size, spec, mtp_symbols=mtp_symbols, words=words))
    return chunks
