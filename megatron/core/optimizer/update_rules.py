"""What an optimizer does with the state of one flat buffer, and which moments it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.registry import OpTable
from megatron.core.ops.sgd_step.scalars import SGDScalars
from megatron.core.optimizer.sharded_state import ShardedState
from megatron.core.optimizer.state_kinds import MAIN_PARAMS


class UpdateRule(Protocol):
    """One step of one optimizer on all that a state holds, in place, and the working weights that follow from it."""

    def __call__(
        self,
        state: ShardedState,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
        digest: bool,
        digest_grad: bool,
    ) -> torch.Tensor | None:
        """``step`` counts from 1. With ``digest``, a rule that can returns the digests of what it wrote: int64
        ``[kinds + 1, P, 2]`` by the state's parts, working weights last; with ``digest_grad`` then the gradient."""
        ...


class AdamW:
    """Adam with decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, ops: OpTable) -> None:
        self._config, self._op = config, ops["adam_pieces"]

    def __call__(
        self,
        state: ShardedState,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
        digest: bool,
        digest_grad: bool,
    ) -> torch.Tensor | None:
        """As ``UpdateRule``."""
        scalars = AdamScalars(
            lr=lr,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            eps=self._config.adam_eps,
            weight_decay=weight_decay,
            step=step,
            clip_factor=clip_factor,
        )
        found = self._op(
            state.plan,
            *state.tensors().values(),
            state.buffer.grad,
            state.buffer.weights,
            scalars=scalars,
            digest=digest,
            digest_grad=digest_grad,
        )
        return found if digest else None


class SGD:
    """Stochastic gradient descent with momentum; the weight decay is part of the gradient."""

    def __init__(self, config: OptimizerConfig, ops: OpTable) -> None:
        self._momentum, self._op = config.sgd_momentum, ops["sgd_step"]

    def __call__(
        self,
        state: ShardedState,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
        digest: bool,
        digest_grad: bool,
    ) -> torch.Tensor | None:
        """As ``UpdateRule``; never returns digests."""
        decaying = SGDScalars(lr=lr, momentum=self._momentum, weight_decay=weight_decay, clip_factor=clip_factor)
        plain, tensors = replace(decaying, weight_decay=0.0), state.tensors()
        for run in state.plan.runs:
            here = slice(run.state, run.state + run.length)
            grad = state.buffer.grad[run.buffer : run.buffer + run.length]
            self._op(tensors[MAIN_PARAMS][here], grad, tensors["exp_avg"][here], decaying if run.decays else plain)
        state.write_working_weights()
        return None


def update_rule(config: OptimizerConfig, ops: OpTable) -> UpdateRule:
    """The rule the configuration asks for."""
    return SGD(config, ops) if config.optimizer == "sgd" else AdamW(config, ops)
