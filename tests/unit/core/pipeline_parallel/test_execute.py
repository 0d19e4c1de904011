"""The executor on one rank: what it keeps, what it frees, and what evaluation leaves alone."""

from __future__ import annotations

import weakref

import torch

from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.pipeline_parallel.execute import PipelineInput, run_pipeline
from tests.support.ranks import groups_for_test
from tests.support.toy_stage import ToyStage, toy_batch


class WatchedStage(ToyStage):
    """Remembers the micro-batches it saw and weak references to its outputs, and when those were alive."""

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        self.__dict__.setdefault("seen", []).append((microbatch, batch.tokens_BS, torch.is_grad_enabled()))
        outputs = self.__dict__.setdefault("outputs", [])
        self.alive = [reference() is not None for reference in outputs]
        output, report = super().forward(batch, activation, microbatch)
        # What travels shares the output's memory; the output itself would keep it alive.
        outputs.append(weakref.ref(output.untyped_storage()))
        return output, report


def _given(num_microbatches: int, training: bool = True) -> PipelineInput:
    return PipelineInput(
        iteration=9,
        shards=(5,),
        num_microbatches=num_microbatches,
        micro_batch_size=2,
        seq_length=7,
        batch=lambda shard, index: toy_batch(index),
        training=training,
    )


def test_every_chunk_sees_every_microbatch_once_with_its_coordinates() -> None:
    groups = groups_for_test()
    chunks = WatchedStage.build_chunks(groups, 2)
    reports = run_pipeline(chunks, groups, _given(3))
    assert sorted(reports) == [(chunk, 5, i) for chunk in range(2) for i in range(3)]
    for chunk in chunks:
        assert [m for m, _, _ in chunk.seen] == [
            Microbatch(iteration=9, shard=5, index=i, num_microbatches=3) for i in range(3)
        ]
        assert all(torch.equal(tokens, toy_batch(i).tokens_BS) for i, (_, tokens, _) in enumerate(chunk.seen))


def test_evaluation_builds_no_graph_and_no_gradient() -> None:
    groups = groups_for_test()
    chunks = WatchedStage.build_chunks(groups, 2)
    reports = run_pipeline(chunks, groups, _given(2, training=False))
    assert len(reports) == 4
    assert all(not grad and not m.training for chunk in chunks for m, _, grad in chunk.seen)
    assert all(p.grad is None for chunk in chunks for p in chunk.model_parameters())
    assert torch.is_grad_enabled()


def test_outputs_are_not_kept_once_they_are_used() -> None:
    groups = groups_for_test()
    (stage,) = WatchedStage.build_chunks(groups, 1)
    run_pipeline([stage], groups, _given(4))
    assert stage.alive == [False] * 3
