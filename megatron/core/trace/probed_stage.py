"""ProbedStage: a chunk that says where its forwards and backwards begin, in logical coordinates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.contracts.stage import Stage
from megatron.core.trace.recorder import Recorder


class ProbedStage:
    """Stands for ``stage``; ``number`` is its virtual stage in the whole model."""

    def __init__(self, stage: Stage, number: int, recorder: Recorder) -> None:
        self._stage, self._number, self._recorder = stage, number, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        """As ``Stage.forward``."""
        recorder = self._recorder
        if not recorder.active or not microbatch.training:
            return self._stage.forward(batch, activation, microbatch)
        self._enter("forward", microbatch)
        given = {"batch": batch} if activation is None else {"batch": batch, "activation": activation}
        recorder.event("input", "batch", outs=recorder.reader.note(given), scope=f"chunk.{self._number}")
        output, report = self._stage.forward(batch, activation, microbatch)
        recorder.event(
            "module", "forward", outs=recorder.reader.note((output, report), reuse=True), scope=f"chunk.{self._number}"
        )
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(partial(self._begin_backward, microbatch))
        return output, report

    def _enter(self, kind: str, at: Microbatch) -> None:
        self._recorder.segment(kind, at.iteration, chunk=self._number, shard=at.shard, microbatch=at.index)

    def _begin_backward(self, microbatch: Microbatch, gradients: tuple) -> None:
        if self._recorder.active:
            self._enter("backward", microbatch)
            given = self._recorder.reader.note(gradients, "grad_output")
            self._recorder.event("input", "gradient", outs=given, scope=f"chunk.{self._number}")
