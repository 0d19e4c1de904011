"""Megatron's front for users."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron import core
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.training.loop.build import build_run
from megatron.training.setup.command_line import start_up
from megatron.training.setup.distributed import stop_process_group
from megatron.training.setup.environment import Launch
from tests.support.ranks import groups_for_test
from tests.support.settings import SMALL


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def test_advice_before_groups_exist() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match=r"pretrain_hybrid\.py.*set_process_groups"):
        parallel_state.get_tensor_model_parallel_group()


def test_answers_come_from_the_groups() -> None:
    groups = groups_for_test()
    parallel_state.set_process_groups(groups)
    assert parallel_state.get_tensor_model_parallel_group() is groups.tp
    for axis in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "data_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
        "expert_data_parallel",
    ):
        assert getattr(parallel_state, f"get_{axis}_world_size")() == 1
        assert getattr(parallel_state, f"get_{axis}_rank")() == 0
        assert getattr(parallel_state, f"get_{axis}_group")().size == 1
    assert parallel_state.is_pipeline_first_stage()
    assert parallel_state.is_pipeline_last_stage()


def test_public_names_load_on_first_use() -> None:
    code = (
        "import sys, megatron.core as core; assert 'torch' not in sys.modules; "
        "from megatron.core import ModelParallelConfig; assert 'torch' not in sys.modules; "
        "from megatron.core import mpu, parallel_state; assert mpu is parallel_state"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert TransformerConfig.__name__ == "TransformerConfig"


def test_unknown_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = core.no_such_name


def test_a_run_answers_for_its_groups_until_it_is_left() -> None:
    """What the advice says: a run that was started the usual way can be asked."""
    run = build_run(start_up([*SMALL, "--seq-length", "16"], {}).config, Launch())
    assert parallel_state.process_groups() is run.groups
    stop_process_group()
    assert not parallel_state.model_parallel_is_initialized()
