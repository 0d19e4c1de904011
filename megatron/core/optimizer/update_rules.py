"""What an optimizer does with one run of a flat buffer, and which moments it keeps for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.ops.adam_step.scalars import AdamScalars
from megatron.core.ops.registry import OpTable
from megatron.core.ops.sgd_step.scalars import SGDScalars

MAIN_PARAMS = "main_params"
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("exp_avg",)}
"""Names of the moments an optimizer keeps; SGD's momentum buffer goes by the name of the first."""


class UpdateRule(Protocol):
    """One step of one optimizer on flat fp32 tensors, in place."""

    def __call__(
        self,
        state: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
    ) -> None:
        """``state`` holds masters and moments by name; ``step`` counts from 1."""
        ...


class AdamW:
    """Adam with decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, ops: OpTable) -> None:
        self._config, self._op = config, ops["adam_step"]

    def __call__(
        self,
        state: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
    ) -> None:
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
        self._op(state[MAIN_PARAMS], grad, state["exp_avg"], state["exp_avg_sq"], scalars)


class SGD:
    """Stochastic gradient descent with momentum; the weight decay is part of the gradient."""

    def __init__(self, config: OptimizerConfig, ops: OpTable) -> None:
        self._momentum, self._op = config.sgd_momentum, ops["sgd_step"]

    def __call__(
        self,
        state: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        *,
        lr: float,
        weight_decay: float,
        clip_factor: float,
        step: int,
    ) -> None:
        """As ``UpdateRule``."""
        scalars = SGDScalars(lr=lr, momentum=self._momentum, weight_decay=weight_decay, clip_factor=clip_factor)
        self._op(state[MAIN_PARAMS], grad, state["exp_avg"], scalars)


def update_rule(config: OptimizerConfig, ops: OpTable) -> UpdateRule:
    """The rule the configuration asks for."""
    return SGD(config, ops) if config.optimizer == "sgd" else AdamW(config, ops)
