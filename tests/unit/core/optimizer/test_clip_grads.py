"""Clip factor, counting, and the message of the stop; layouts are tested in tests/dist."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.ops.norm_blocks.reference import norm_blocks
from megatron.core.optimizer.clip_grads import clip_factor, measure, stop_not_finite
from tests.support.ranks import groups_for_test
from tests.support.toy_stage import SpecStage, build_engine, stage_specs


@pytest.mark.parametrize(
    ("norm", "clip", "factor"),
    [(0.5, 1.0, 1.0), (2.0, 1.0, 1.0 / (2.0 + 1e-6)), (7.0, 0.0, 1.0), (0.0, 1.0, 1.0)],
)
def test_clip_factor_is_megatrons_formula_in_fp64(norm: float, clip: float, factor: float) -> None:
    assert clip_factor(norm, clip) == factor


def test_measure_counts_and_sees_what_the_norm_does_not() -> None:
    groups = groups_for_test()
    values = torch.tensor([3.0, 0.0, -4.0])
    measured = measure([values], norm_blocks, groups, zeros_of=[values])
    assert (measured.norm, measured.num_zeros, measured.finite) == (5.0, 1, True)
    assert measure([], norm_blocks, groups).norm == 0.0
    uncounted = measure([values], norm_blocks, groups, extremes=[torch.tensor([0.0, math.inf])])
    assert (uncounted.norm, uncounted.finite) == (5.0, False)
    assert not measure([torch.tensor([math.nan])], norm_blocks, groups).finite


def test_the_message_names_rank_parameter_and_iteration() -> None:
    groups = groups_for_test()
    stage = SpecStage(stage_specs(groups))
    parallel, _ = build_engine([stage], groups)
    for param in stage.params[:5]:
        param.main_grads[0].view(-1)[0] = math.nan
    parallel.finalize_model_grads()
    with pytest.raises(TrainingStoppedError, match=r"iteration 12: .* rank 0 \(.*weight.* and 2 more\)"):
        stop_not_finite(parallel.buffers, groups, 12)
