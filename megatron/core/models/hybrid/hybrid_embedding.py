"""Token embeddings, learned positions and embedding dropout: the start of the first chunk."""

from __future__ import annotations

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Batch, Microbatch
from megatron.core.contracts.param_spec import Initial
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding, lookup
from megatron.core.tensor_parallel.parameter import create_parameter, replicated_spec
from megatron.core.transformer.dropout import ResidualDropout

EMBEDDING_LAYER = -1
"""Layer number that names the embedding's noise."""


class PositionTable(torch.nn.Module):
    """Learned positions: ``weight [max_position_embeddings, H]``, held whole by every rank."""

    def __init__(self, name: str, config: TransformerConfig, context: ModelContext, *, std: float, decay: bool) -> None:
        super().__init__()
        self.context = context
        shape = (config.max_position_embeddings, config.hidden_size)
        normal = Initial(kind="normal", a=std)
        self.weight: ModelParameter = create_parameter(
            replicated_spec(f"{name}.weight", shape, normal, context, weight_decay=decay), context
        )

    def forward(self, position_ids_BS: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's positions, ``[S, B, H]`` or ``[S / TP, B, H]``."""
        ids_SB = position_ids_BS.t()
        if self.context.cuts_sequence:
            tp = self.context.groups.tp
            ids_SB = ids_SB.chunk(tp.size)[tp.rank]
        return lookup(self.weight, ids_SB.reshape(-1), self.context).view(*ids_SB.shape, -1)


def _deviation(config: TransformerConfig) -> tuple[float, bool]:
    """(standard deviation, decays) of the embeddings: with a deviation of their own they do not decay."""
    std = config.embedding_init_method_std
    return (config.init_method_std, True) if std is None else (std, False)


def word_table(name: str, config: TransformerConfig, context: ModelContext) -> VocabParallelEmbedding:
    """The table of token embeddings. The last stage needs it too where it is the output layer's weight or where tokens
    ahead are predicted."""
    std, decay = _deviation(config)
    return VocabParallelEmbedding(
        f"{name}.word_embeddings",
        config.hidden_size,
        context,
        init_std=std,
        weight_decay=decay,
        two_stage=config.embeds_on_last_stage,
    )


class HybridEmbedding(torch.nn.Module):
    """The residual stream's start, in the residual's type.

    A chunk that is not the first holds the word table alone (``positions`` off): for the output layer, and for
    ``look_ahead``. ``words`` is a table that another chunk of this rank made already.
    """

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        context: ModelContext,
        *,
        positions: bool = True,
        words: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        std, decay = _deviation(config)
        self.word_embeddings = word_table(name, config, context) if words is None else words
        self._first = "first" if config.embeds_on_last_stage else ""
        self.position_embeddings = (
            PositionTable(f"{name}.position_embeddings", config, context, std=std, decay=decay)
            if positions and config.position_embedding_type == "learned_absolute"
            else None
        )
        self._config, self._context = config, context
        self._dropout = ResidualDropout(config.hidden_dropout, context, EMBEDDING_LAYER, "embedding")
        self._dtype = torch.float32 if config.fp32_residual_connection else context.params_dtype

    def forward(self, batch: Batch, microbatch: Microbatch) -> torch.Tensor:
        """``[S, B, H]``, or this rank's positions of it under sequence parallelism."""
        x_SBH = self.word_embeddings(batch.tokens_BS, self._first)
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(batch.position_ids_BS)
        return self._dropout(x_SBH.to(self._dtype), microbatch)

    def look_ahead(self, tokens_BS: torch.Tensor, depth: int, microbatch: Microbatch) -> torch.Tensor:
        """Embeddings of the tokens that prediction depth ``depth`` (from 1) reads, on the last stage, in the form and
        type of ``forward``."""
        x_SBH = self.word_embeddings(tokens_BS, "last").to(self._dtype)
        dropout = ResidualDropout(
            self._config.hidden_dropout, self._context, EMBEDDING_LAYER, f"embedding_ahead_{depth}"
        )
        return dropout(x_SBH, microbatch)
