"""AdamW against torch's own in fp64, over several steps, with clipping."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.adam_pieces import adamw as module
from megatron.core.ops.adam_pieces.adamw import adamw, adamw_in_parts
from megatron.core.ops.adam_pieces.scalars import AdamScalars

SCALARS = AdamScalars(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, clip_factor=0.5)


def _state(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=generator).to(dtype), *(torch.zeros(numel, dtype=dtype) for _ in range(2))]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_adamw_in_fp64(weight_decay):
    param, exp_avg, exp_avg_sq = _state(999, torch.float64)
    leaf = param.clone().requires_grad_()
    theirs = torch.optim.AdamW([leaf], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 8):
        grad = torch.randn(999, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        leaf.grad = grad * 0.5
        theirs.step()
        scalars = dataclasses.replace(SCALARS, step=step, weight_decay=weight_decay)
        adamw(param, grad, exp_avg, exp_avg_sq, scalars)
    torch.testing.assert_close(param, leaf.detach(), rtol=1e-12, atol=1e-14)


def test_the_gradient_is_not_changed():
    param, exp_avg, exp_avg_sq = _state(2049, torch.float32)
    grad = param.clone()
    adamw_in_parts(param, grad, exp_avg, exp_avg_sq, SCALARS)
    assert same_bits(grad, _state(2049, torch.float32)[0])


def test_parts_of_every_size_give_the_same_bits(monkeypatch):
    whole, grad = _state(4 * 1024 + 13, torch.float32), torch.randn(4 * 1024 + 13)
    adamw(whole[0], grad, *whole[1:], SCALARS)
    for size in (1, 7, 1024, 1031, 5000):
        monkeypatch.setattr(module, "_PART", {"cpu": size})
        cut = _state(4 * 1024 + 13, torch.float32)
        adamw_in_parts(cut[0], grad, *cut[1:], SCALARS)
        assert all(same_bits(a, b) for a, b in zip(cut, whole, strict=True)), size


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="count from 1"):
        dataclasses.replace(SCALARS, step=0)
