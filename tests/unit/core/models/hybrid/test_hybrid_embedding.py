"""The start of the residual stream."""

from __future__ import annotations

import pytest
import torch

from megatron.core.contracts.batch import Microbatch
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_embedding import HybridEmbedding
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_batch, tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)


def test_words_and_positions_are_added() -> None:
    config = tiny_config(position_embedding_type="learned_absolute")
    embedding = HybridEmbedding("embedding", config, tiny_context(groups_for_test()))
    batch = tiny_batch(0, 0, size=2)
    words, positions = (m.weight.detach() for m in (embedding.word_embeddings, embedding.position_embeddings))
    want = words[batch.tokens_BS.t()] + positions[batch.position_ids_BS.t()]
    out = embedding(batch, MICROBATCH)
    assert same_bits(out.detach(), want)
    out.sum().backward()
    assert embedding.position_embeddings.weight.grad.eq(2.0).all()


@pytest.mark.parametrize("kind", ["rope", "none"])
def test_other_positions_need_no_table(kind: str) -> None:
    embedding = HybridEmbedding("embedding", tiny_config(position_embedding_type=kind), tiny_context(groups_for_test()))
    assert [name for name, _ in embedding.named_parameters()] == ["word_embeddings.weight"]


def test_fp32_residual_starts_here() -> None:
    context = tiny_context(groups_for_test(), dtype=torch.bfloat16)
    for wide in (False, True):
        embedding = HybridEmbedding("embedding", tiny_config(fp32_residual_connection=wide), context)
        assert embedding(tiny_batch(0, 0), MICROBATCH).dtype == (torch.float32 if wide else torch.bfloat16)


def test_dropout_scales_what_it_keeps() -> None:
    embedding = HybridEmbedding("embedding", tiny_config(hidden_dropout=0.5), tiny_context(groups_for_test()))
    batch = tiny_batch(0, 0)
    out = embedding(batch, MICROBATCH).detach()
    full = 2.0 * embedding.word_embeddings.weight.detach()[batch.tokens_BS.t()]
    kept = out != 0
    assert same_bits(out[kept], full[kept])
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.03)
