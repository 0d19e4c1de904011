"""Hooks on the modules of a chunk: inputs and outputs of every forward, gradients of both in the backward.

Only hooks that return nothing are used and no node is added to the graph, so autograd adds the same gradients in the
same order as without them. A module's gradients are recorded when those of all its inputs are there; hooks of inner
modules are placed first, so that the innermost event comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron.core.trace.flatten import Named, named_tensors
from megatron.core.trace.recorder import Note, Recorder


class ModuleHooks:
    """Hooks of one chunk; every module is called by its path, which is the parameters' global name."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self, chunk: torch.nn.Module, *, parts: bool = True) -> list[RemovableHandle]:
        """Hook every module below ``chunk`` that computes something of its own; the handles take the hooks off.

        Without ``parts`` a module that is made of nothing but modules without children (a mixer of its projections and
        norm) is taken as one.
        """
        handles = []
        inner = set() if parts else _parts(chunk)
        for name, module in chunk.named_modules():
            if name and name not in inner and not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
                handles.append(module.register_forward_pre_hook(_Before(self, name), with_kwargs=True))
                handles.append(module.register_forward_hook(_After(self, name)))
        return handles

    def before(self, name: str, args: tuple, kwargs: dict) -> None:
        """A module starts."""
        recorder = self._recorder
        if recorder.active:
            given = named_tensors((args, kwargs))
            recorder.push(name, (given, recorder.noted(given, flag=True, reuse=True)))

    def after(self, name: str, output: Any) -> None:
        """A module is done."""
        recorder = self._recorder
        if not recorder.active:
            return
        made = named_tensors(output)
        outs = recorder.noted(made, reuse=True)
        given, ins = recorder.pop(name)
        recorder.event("module", "forward", ins=ins, outs=outs, scope=name)
        if torch.is_grad_enabled():
            self._watch_gradients(name, given, made)

    def _watch_gradients(self, name: str, given: Sequence[Named], made: Sequence[Named]) -> None:
        backward = _Gradients(self._recorder, name)
        for label, tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(backward.output_hook(f"grad_output.{label}" if label else "grad_output"))
        for label, tensor in given:
            if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
                backward.expected += 1
                tensor.register_hook(backward.input_hook(f"grad_input.{label}"))


def _parts(chunk: torch.nn.Module) -> set[str]:
    """Names of the modules that have no children, and whose siblings have none."""
    found: set[str] = set()
    for name, module in chunk.named_modules():
        children = dict(module.named_children())
        if name and not any(any(child.children()) for child in children.values()):
            found |= {f"{name}.{child}" for child in children}
    return found


class _Before:
    def __init__(self, hooks: ModuleHooks, name: str) -> None:
        self._hooks, self._name = hooks, name

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self._hooks.before(self._name, args, kwargs)


class _After:
    def __init__(self, hooks: ModuleHooks, name: str) -> None:
        self._hooks, self._name = hooks, name

    def __call__(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        self._hooks.after(self._name, output)


class _Gradients:
    """Gradients of one call of a module, until all of them have arrived."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self.expected = 0
        self._outputs: list[Note] = []
        self._inputs: list[Note] = []

    def output_hook(self, label: str) -> Any:
        """A hook for the gradient of one output."""

        def hook(grad: torch.Tensor) -> None:
            if self._recorder.active:
                self._outputs += self._recorder.note(grad, label, reuse=True)

        return hook

    def input_hook(self, label: str) -> Any:
        """A hook for the gradient of one input."""

        def hook(grad: torch.Tensor) -> None:
            if not self._recorder.active:
                return
            self._inputs += self._recorder.note(grad, label, reuse=True)
            self.expected -= 1
            if self.expected == 0:
                self._recorder.event("module", "backward", ins=self._outputs, outs=self._inputs, scope=self._name)

        return hook
