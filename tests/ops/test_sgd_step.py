"""SGD against torch's own in fp64, over several steps."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.sgd_step.reference import sgd_step
from megatron.core.ops.sgd_step.scalars import SGDScalars


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_sgd_in_fp64(momentum: float, weight_decay: float) -> None:
    param = torch.randn(999, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    buffer, leaf = torch.zeros_like(param), param.clone().requires_grad_()
    sgd = torch.optim.SGD([leaf], lr=3e-3, momentum=momentum, weight_decay=weight_decay)
    scalars = SGDScalars(lr=3e-3, momentum=momentum, weight_decay=weight_decay, clip_factor=0.5)
    for step in range(1, 8):
        grad = torch.randn(999, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        leaf.grad = grad * 0.5
        sgd.step()
        sgd_step(param, grad, buffer, scalars)
    torch.testing.assert_close(param, leaf.detach(), rtol=1e-12, atol=1e-14)
