"""Torch's switches: all set in deterministic mode, none touched without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.registry import Guarantee
from megatron.training.setup.determinism import kept_promise, pin_arithmetic, switches

LOOSE = {
    "deterministic_algorithms": False,
    "cudnn_benchmark": True,
    "cudnn_deterministic": False,
    "cudnn_allow_tf32": True,
    "matmul_allow_tf32": True,
    "matmul_allow_bf16_reduced_precision": True,
    "cpu_threads": 2,
}
PINNED = {name: name in ("deterministic_algorithms", "cudnn_deterministic") for name in LOOSE} | {"cpu_threads": 1}


@pytest.fixture(autouse=True)
def _loose_switches() -> Iterator[None]:
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.set_num_threads(2)
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.set_num_threads(1)


def test_nothing_is_touched_without_the_mode():
    pin_arithmetic(NumericsConfig())
    assert switches() == LOOSE


def test_every_switch_is_pinned():
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    assert switches() == PINNED
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_an_operation_without_a_deterministic_form_is_refused():
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)


def test_promise_needs_the_switches():
    assert kept_promise(NumericsConfig(deterministic_mode=True), Guarantee.BATCH) == "BATCH"
    assert kept_promise(NumericsConfig(), Guarantee.BATCH) == "NONE"
