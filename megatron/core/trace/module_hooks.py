"""Probes on the modules of a chunk: inputs and outputs of every forward, gradients of both in the backward.

Hooks on gradients return nothing and no node is added to the graph, so autograd adds the same gradients in the same
order as without them. A module's gradients are recorded when those of all its inputs are there; hooks of inner modules
are placed first, so that the innermost event comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.trace.flatten import Named, named_tensors
from megatron.core.trace.reader import Note
from megatron.core.trace.recorder import Recorder


class Probed:
    """A module whose ``forward`` was replaced; the last one replaced is to be put back first."""

    def __init__(self, module: torch.nn.Module, replacement: Callable[..., Any]) -> None:
        self._module, self._before = module, vars(module).get("forward")
        vars(module)["forward"] = replacement

    def remove(self) -> None:
        """Put back the forward of before."""
        if self._before is None:
            del vars(self._module)["forward"]
        else:
            vars(self._module)["forward"] = self._before


def probe_modules(chunk: torch.nn.Module, recorder: Recorder, *, parts: bool = True) -> list[Probed]:
    """Record every module below ``chunk`` that computes something of its own, under its path, which is the parameters'
    global name.

    Without ``parts`` a module that is made of nothing but modules without children (a mixer of its projections and
    norm) is taken as one. One that the recorder listens to already, as a part of another chunk too, is left alone.
    """
    inner = set() if parts else _parts(chunk)
    return [
        Probed(module, _recorded(name, module.forward, recorder))
        for name, module in chunk.named_modules()
        if name
        and name not in inner
        and not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        and getattr(module.forward, "recorder", None) is not recorder
    ]


def _parts(chunk: torch.nn.Module) -> set[str]:
    """Names of the modules that have no children, and whose siblings have none."""
    found: set[str] = set()
    for name, module in chunk.named_modules():
        children = dict(module.named_children())
        if name and not any(any(child.children()) for child in children.values()):
            found |= {f"{name}.{child}" for child in children}
    return found


def _recorded(name: str, forward: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    reader = recorder.reader

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return forward(*args, **kwargs)
        given = named_tensors((args, kwargs) if kwargs else (args,))
        ins = reader.noted(given, flag=True, reuse=True)
        with recorder.scopes.inside(name):
            output = forward(*args, **kwargs)
        made = named_tensors(output)
        recorder.event("module", "forward", ins=ins, outs=reader.noted(made, reuse=True), scope=name)
        if torch.is_grad_enabled():
            _watch_gradients(name, given, made, recorder)
        return output

    call.recorder = recorder  # type: ignore[attr-defined]
    return call


def _watch_gradients(name: str, given: Sequence[Named], made: Sequence[Named], recorder: Recorder) -> None:
    backward = _Gradients(name, recorder)
    for label, tensor in made:
        if tensor.requires_grad:
            _on_gradient(tensor, functools.partial(backward.of_output, f"grad_output.{label}".removesuffix(".")))
    for label, tensor in given:
        if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            backward.expected += 1
            _on_gradient(tensor, functools.partial(backward.of_input, f"grad_input.{label}"))


def _on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Call ``hook`` with the whole gradient of a tensor, when it is there."""
    node, place = tensor.grad_fn, tensor.output_nr
    if node is None:
        tensor.register_hook(hook)
    else:
        # A third of the time that a hook on the tensor takes.
        node.register_prehook(lambda gradients: hook(gradients[place]))


class _Gradients:
    """Gradients of one call of a module, until all of them have arrived."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder = name, recorder
        self.expected = 0
        self._outputs: list[Note] = []
        self._inputs: list[Note] = []

    def of_output(self, label: str, gradient: torch.Tensor | None) -> None:
        """The gradient of one output."""
        if self._recorder.active:
            self._outputs += self._recorder.reader.note(gradient, label, reuse=True)

    def of_input(self, label: str, gradient: torch.Tensor | None) -> None:
        """The gradient of one input."""
        recorder = self._recorder
        if not recorder.active:
            return
        self._inputs += recorder.reader.note(gradient, label, reuse=True)
        self.expected -= 1
        if self.expected == 0:
            recorder.event("module", "backward", ins=self._outputs, outs=self._inputs, scope=self._name)
