"""Runs keep block borders and never mix what must be treated differently; state offsets follow the spans."""

from __future__ import annotations

import pytest

from megatron.core.contracts.param_spec import SHARD_ALIGNMENT
from megatron.core.distributed.bucket_plan import plan_buffers, plan_spans
from megatron.core.optimizer.shard_plan import StateOffsets, plan_runs
from tests.support.ranks import groups_for_test
from tests.support.toy_stage import DEFAULT_BUCKETS, stage_specs


@pytest.mark.parametrize("dp", [1, 3, 8])
def test_runs_cover_pieces_and_agree_with_them(dp: int) -> None:
    for plan in plan_buffers(stage_specs(groups_for_test()), dp=dp, edp=dp, config=DEFAULT_BUCKETS):
        for rank in range(dp):
            for span in plan_spans(plan, rank, dp):
                runs = plan_runs(span, lambda piece: piece.spec.weight_decay)
                assert all(run.start % SHARD_ALIGNMENT == run.stop % SHARD_ALIGNMENT == 0 for run in runs)
                assert all(a.stop == b.start and a.fact != b.fact for a, b in zip(runs, runs[1:], strict=False))
                for piece in span.pieces:
                    (run,) = [r for r in runs if r.start <= piece.offset < r.stop]
                    assert piece.stop <= run.stop
                    assert run.fact == piece.spec.weight_decay
                assert bool(runs) == bool(span.pieces)


def test_state_lies_span_after_span() -> None:
    (plan, *_) = plan_buffers(stage_specs(groups_for_test()), dp=2, edp=2, config=DEFAULT_BUCKETS)
    spans = plan_spans(plan, 1, 2) + tuple(
        type(s)(start=s.start + 10**6, stop=s.stop + 10**6, pieces=()) for s in plan_spans(plan, 0, 2)
    )
    offsets = StateOffsets(spans)
    assert offsets.numel == sum(span.length for span in spans)
    assert offsets.at(spans[0].start) == 0
    assert offsets.at(spans[1].start + 5) == spans[0].length + 5
