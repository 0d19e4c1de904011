"""ParamGather: updated weights on their way to all data-parallel ranks, and the modules that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatron.core.contracts.parameter import ModelParameter
from megatron.core.contracts.stage import Stage
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.distributed.readiness import Unit

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_Place = tuple[ParamAndGradBuffer, int]


class ParamGather:
    """Begins the gathers of a step bucket by bucket, in the order in which forwards need them, and lets a module's
    forward wait for the buckets of its own parameters.

    Waits are where a module is called: before a layer for all of its parameters, before a chunk for what both pipeline
    ends share and for what belongs to no module. That this covers every use is checked in the first training pass,
    whose weights are complete in any case.
    """

    def __init__(
        self, buffers: Sequence[ParamAndGradBuffer], chunks: Sequence[Stage], units: Sequence[Sequence[Unit]]
    ) -> None:
        self._order = list(dict.fromkeys(place for of_chunk in units for place in _order(buffers, of_chunk)))
        self._names = {id(p): p.spec.name for stage in chunks for p in stage.model_parameters()}
        self._open: dict[_Place, None] = {}
        self._covered: list[set[int]] | None = [set() for _ in chunks]
        self._unchecked = set(range(len(chunks)))
        self._at_start: list[tuple[tuple[_Place, ...], set[int]]] = []
        for chunk, stage in enumerate(chunks):
            places = {id(param): (buffers[u.buffer], u.bucket) for u in units[chunk] for param in u.params}
            shared = {id(param) for param in stage.model_parameters() if len(param.spec.stages) == 2}
            waited: set[int] = set()
            for module, params in _waiting_modules(stage) if isinstance(stage, torch.nn.Module) else ():
                mine = {id(param) for param in params}
                waited |= mine
                self._hook(module, chunk, tuple(dict.fromkeys(places[id(param)] for param in params)), mine)
            alone = shared | (places.keys() - waited)
            self._at_start.append((tuple(dict.fromkeys(place for key, place in places.items() if key in alone)), alone))

    def _hook(self, module: torch.nn.Module, chunk: int, places: tuple[_Place, ...], params: set[int]) -> None:
        module.register_forward_pre_hook(partial(self._before_module, chunk, places, params))

    def start(self) -> None:
        """Begin all gathers; every rank's owned spans hold new weights."""
        for buffer, bucket in self._order:
            buffer.start_gather(bucket)
        self._open.update(dict.fromkeys(self._order))

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(tuple(self._open))

    def begin_forward(self, chunk: int) -> None:
        """Before every forward of a chunk."""
        places, params = self._at_start[chunk]
        self._wait(places)
        if self._covered is not None:
            self._covered[chunk] |= params

    def check(self, chunk: int, used: Callable[[int], set[int]]) -> None:
        """After a chunk's pass: every parameter in ``used(chunk)`` was waited for; asked of the first one alone.

        Raises:
            RuntimeError: some are used without their module being called.
        """
        if self._covered is None or chunk not in self._unchecked:
            return
        missed = sorted(self._names[key] for key in used(chunk) - self._covered[chunk])
        if missed:
            raise RuntimeError(
                f"used without a call of the module they belong to: {', '.join(missed)}; their gathers would not be "
                "waited for, so this model cannot be trained with --overlap-param-gather"
            )
        self._unchecked.discard(chunk)
        if not self._unchecked:
            self._covered = None

    def _before_module(self, chunk: int, places: tuple[_Place, ...], params: set[int], *_: object) -> None:
        if self._open:
            self._wait(places)
        if self._covered is not None:
            self._covered[chunk] |= params

    def _wait(self, places: Sequence[_Place]) -> None:
        for place in places:
            if place in self._open:
                del self._open[place]
                place[0].await_weights(place[1])


def _order(buffers: Sequence[ParamAndGradBuffer], units: Sequence[Unit]) -> list[_Place]:
    """Buckets in the order in which the chunk's forward needs them: what both ends share, then as registered."""
    places = [(buffers[unit.buffer], unit.bucket) for unit in reversed(units)]
    return sorted(places, key=lambda place: not place[0].plan.key.two_stage)


def _waiting_modules(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[ModelParameter]]]:
    """Modules below ``module`` whose forward waits, each with the parameters it waits for: one that holds lists of
    modules waits for its own parameters only, any other for all parameters below it."""
    for child in module.children():
        lists = any(isinstance(inner, _CONTAINERS) for inner in child.modules())
        params = [p for p in child.parameters(recurse=not lists) if isinstance(p, ModelParameter)]
        if params:
            yield child, params
        if lists:
            yield from _waiting_modules(child)
