"""Torch's switches: all set in deterministic mode, none touched without it."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.registry import Guarantee
from megatron.core.process_groups.float_sum_guard import refuse_float_sums
from megatron.training.setup.determinism import (
    enter_deterministic_mode,
    kept_promise,
    pin_arithmetic,
    switches,
)
from megatron.training.setup.pinned_environment import PINS
from megatron.training.setup.pinned_switches import SWITCHES

PINNED = {switch.name: switch.value for switch in SWITCHES if not switch.cuda}
LOOSE = {
    name: {"float32_matmul_precision": "high", "cpu_threads": 2}.get(name, not value) for name, value in PINNED.items()
}


def _set_loose() -> None:
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _loose_switches() -> Iterator[None]:
    _set_loose()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    torch.set_num_threads(1)
    refuse_float_sums()()


def test_nothing_is_touched_without_the_mode():
    pin_arithmetic(NumericsConfig())
    assert switches() == LOOSE


def test_every_switch_is_pinned():
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    assert switches() == PINNED


def test_an_operation_without_a_deterministic_form_is_refused():
    pin_arithmetic(NumericsConfig(deterministic_mode=True))
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)


def test_promise_needs_the_switches():
    assert kept_promise(NumericsConfig(deterministic_mode=True), Guarantee.BATCH) == "BATCH"
    assert kept_promise(NumericsConfig(), Guarantee.BATCH) == "NONE"


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the pinned variables is set; what a test sets is taken away again."""
    for pin in PINS:
        monkeypatch.setenv(pin.name, "")
        monkeypatch.delenv(pin.name)


@pytest.mark.usefixtures("bare_environment")
def test_a_program_of_ones_own_gets_what_the_script_does():
    done = enter_deterministic_mode()
    assert done == {pin.name: pin.value for pin in PINS if pin.value is not None}
    assert {name: os.environ[name] for name in done} == done
    assert switches() == PINNED
    assert enter_deterministic_mode() == {}


@pytest.mark.usefixtures("bare_environment")
def test_called_too_late_it_says_what_has_started_and_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", types.ModuleType("mamba_ssm"))
    with pytest.raises(ConfigError, match="mamba_ssm is in use already, started without MAMBA_DETERMINISTIC"):
        enter_deterministic_mode()
    assert switches() == LOOSE
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    assert "CUBLAS_WORKSPACE_CONFIG" in enter_deterministic_mode()


@pytest.mark.usefixtures("bare_environment")
def test_a_bad_value_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(ConfigError, match="NCCL_ALGO=Tree"):
        enter_deterministic_mode()
    enter_deterministic_mode(allow_env="NCCL_ALGO")
