"""A vocabulary that the tensor-parallel size does not divide: its padding leaves no trace in loss or gradients."""

from __future__ import annotations

import pytest
import torch

from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.tiny import (
    attach_main_grads,
    gather_whole,
    relative_error,
    run_microbatches,
    tiny_config,
    tiny_context,
)

VOCAB_SIZE = 509
TOLERANCE = 1e-5


def _step(tp: int, padded: int) -> tuple[float, dict[str, torch.Tensor]]:
    groups = groups_for_test(tp=tp)
    context = tiny_context(groups, padded_vocab_size=padded)
    chunks = build_hybrid_chunks(tiny_config(hybrid_layer_pattern="*-"), context, VOCAB_SIZE)
    params = attach_main_grads(chunks)
    losses, _ = run_microbatches(chunks, [(0, 0)], 1, 1)
    return losses[0, 0][0], gather_whole(groups, params)


@pytest.mark.parametrize(("tp", "padded"), [(1, 512), (1, 640), (2, 510), (2, 1024), (4, 512), (4, 2048)])
def test_padding_does_not_enter(tp: int, padded: int) -> None:
    """BR-33; with (4, 2048) two ranks hold nothing but padding."""
    want_loss, want = _step(1, VOCAB_SIZE)
    for loss, grads in run_ranks(tp, _step, tp, padded):
        assert loss == pytest.approx(want_loss, rel=TOLERANCE)
        for name, grad in want.items():
            rows = grads[name][:VOCAB_SIZE] if grad.shape[0] == VOCAB_SIZE else grads[name]
            assert relative_error(rows, grad) <= TOLERANCE, name
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert not grads[name][VOCAB_SIZE:].any()
