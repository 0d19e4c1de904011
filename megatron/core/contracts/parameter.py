"""ModelParameter: a working weight that knows its ParamSpec and where its gradient is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.contracts.param_spec import ParamSpec


class ModelParameter(torch.nn.Parameter):
    """A working weight of shape ``spec.local_shape``.

    ``main_grads`` is filled by the engine with one fp32 view per entry of ``spec.stages`` (one where it is empty),
    each of the parameter's shape. Until then gradients go to ``.grad`` as in any module, so that a layer can be used
    on its own. ``on_grad``, where an engine has set it, is called whenever the gradient of one use has been added.
    """

    spec: ParamSpec
    main_grads: tuple[torch.Tensor, ...]
    on_grad: Callable[[ModelParameter], None] | None

    def __new__(cls, data: torch.Tensor, spec: ParamSpec) -> ModelParameter:
        if tuple(data.shape) != spec.local_shape:
            raise ValueError(f"{spec.name}: tensor of shape {tuple(data.shape)}, spec says {spec.local_shape}")
        self = super().__new__(cls, data, requires_grad=True)
        self.spec = spec
        self.main_grads = ()
        self.on_grad = None
        return self

    def __deepcopy__(self, memo: dict) -> ModelParameter:
        copy = type(self)(self.data.clone(), self.spec)
        memo[id(self)] = copy
        return copy


def main_grad(param: ModelParameter, stage: str = "") -> torch.Tensor | None:
    """The fp32 buffer that uses of ``param`` at ``stage`` ("first" or "last" where its spec has stages) add into, or
    ``None`` while no engine has taken the parameter. Code that adds into it calls ``param.on_grad`` afterwards."""
    if not param.main_grads:
        return None
    return param.main_grads[param.spec.stages.index(stage) if stage else 0]


def accumulate_grad(param: ModelParameter, grad: torch.Tensor, stage: str = "") -> torch.Tensor | None:
    """Add one use's gradient (fp32, shape of ``param``) straight into the main gradient.

    Returns what the calling ``backward`` hands on to autograd: nothing once an engine owns the parameter, otherwise
    the gradient in the parameter's type.
    """
    buffer = main_grad(param, stage)
    if buffer is None:
        return grad.to(param.dtype)
    buffer.add_(grad)
    if param.on_grad is not None:
        param.on_grad(param)
    return None


class _UseInFp32(Node):
    @staticmethod
    def forward(ctx: Any, *params: ModelParameter) -> tuple[torch.Tensor, ...]:
        ctx.params = params
        return tuple(param.detach() if param.dtype == torch.float32 else param.float() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(map(accumulate_grad, ctx.params, grads))


def use_all_in_fp32(*params: ModelParameter) -> tuple[torch.Tensor, ...]:
    """Small parameters that are used together (norm weight and bias, conv taps, ...) as fp32, to be read only; their
    gradients arrive in fp32 and go straight into the main gradients. Call it once per use, and use them all."""
    return _UseInFp32.apply(*params)


def use_in_fp32(param: ModelParameter) -> torch.Tensor:
    """``use_all_in_fp32`` of one."""
    return _UseInFp32.apply(param)[0]
