"""Vocab-parallel loss on one rank against torch's, with padding columns."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_context


def test_loss_and_gradient_agree_with_torch() -> None:
    context = tiny_context(groups_for_test())
    logits = (torch.randn(33, 128) * 4).requires_grad_()
    labels = torch.randint(0, 100, (33,))
    loss = vocab_parallel_cross_entropy(logits, labels, 100, context)
    weight = torch.rand(33)
    loss.backward(weight)
    twin = logits.detach().requires_grad_()
    want = cross_entropy(twin[:, :100], labels, reduction="none")
    want.backward(weight)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(logits.grad, twin.grad)
    assert not logits.grad[:, 100:].any()


def test_not_a_number_stays_visible() -> None:
    logits = torch.randn(4, 16)
    logits[2, 3] = float("nan")
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), 16, tiny_context(groups_for_test()))
    assert loss.isnan().tolist() == [False, False, True, False]
