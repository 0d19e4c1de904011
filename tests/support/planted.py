"""Faults to plant into a training run, one per common source of runs that differ, and the runs that carry them.

Every fault is there in both runs; ``strikes`` says in which run it changes a value, so that nothing but the value tells
the runs apart.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist

from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import OpTable, build_table
from megatron.core.process_groups import backend
from megatron.core.process_groups.groups import create_process_groups
from megatron.core.tensor_parallel.parameter import ModelParameter
from megatron.core.transformer.moe.balance import AuxiliaryLosses
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.resolve import resolve_vocabulary, topology_of
from megatron.training.config.validate import resolve_and_validate
from megatron.training.data.provider import tokenizer_from
from megatron.training.loop.build import Run, assemble_run, params_dtype
from megatron.training.loop.fingerprints import run_manifest
from megatron.training.setup.environment import Launch
from tests.support.training import TINY, master_of

TUNED = SimpleNamespace(best_config="BLOCK: 32")
"""Stands for a kernel whose tuner left its choice on it."""


def change_memory(tensor: torch.Tensor, element: int = 0) -> None:
    """Flip the last bit of one element behind the dispatcher's back."""
    tensor.detach().reshape(-1)[element : element + 1].view(torch.uint8).numpy()[0] ^= 1


def with_op(table: OpTable, name: str, make: Callable[[Callable], Callable]) -> OpTable:
    """The table with another callable for one op."""
    variant = table.chosen[name]
    changed = dataclasses.replace(variant, fn=make(variant.fn))
    return dataclasses.replace(table, chosen={**table.chosen, name: changed})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """How a fault gets into a run: around its ops, around its steps, or into its state before a step."""

    ops: Callable[[OpTable, bool, int], OpTable] = lambda table, strikes, rank: table
    around: Callable[[bool, int], contextmanager] | None = None
    before_step: Callable[[Run, bool, int], None] = lambda run, strikes, rank: None


@contextmanager
def nothing(strikes: bool, rank: int) -> Iterator[None]:
    """No patch."""
    yield


def run_planted(folder: Path, flags: str, fault: Fault | None, strikes: bool, steps: int = 2) -> None:
    """Rank function: train with a fault in place, traced into ``folder``; the fault strikes in step 2."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    words = shlex.split(f"{TINY} {flags} --trace-dir {folder}")
    config = resolve_and_validate(parse_run_config(words), world)
    tokenizer = tokenizer_from(config.tokenizer)
    config = resolve_vocabulary(config, tokenizer.vocab_size)
    device, fault, armed = torch.device("cpu"), fault or Fault(), SimpleNamespace(now=False)
    ops = build_table(ALL_OPS, config.numerics, device, params_dtype(config))
    ops = fault.ops(ops, _Strike(strikes, armed), rank)
    groups = create_process_groups(topology_of(config, world), device)
    run = assemble_run(config, tokenizer, ops, groups, Launch(rank=rank, world_size=world), "gloo")
    run.tracing.open(run_manifest(run, 0))
    reader, consumed = run.reader(run.splits.train), 0
    with (fault.around or nothing)(_Strike(strikes, armed), rank):
        for iteration in range(1, steps + 1):
            armed.now = iteration == 2
            fault.before_step(run, _Strike(strikes, armed), rank)
            consumed = run.step.run(reader, iteration, consumed).consumed_samples
    run.tracing.close()


class _Strike:
    """True while the fault is to change a value."""

    def __init__(self, strikes: bool, armed: SimpleNamespace) -> None:
        self._strikes, self._armed = strikes, armed

    def __bool__(self) -> bool:
        return self._strikes and self._armed.now


def tuned_elsewhere(table: OpTable, strikes: bool, rank: int) -> OpTable:
    """Rank 1's tuner picks another block size, which adds in another order."""

    def make(original: Callable) -> Callable:
        def rms_norm(*args: object) -> torch.Tensor:
            out = original(*args)
            TUNED.best_config = "BLOCK: 64" if strikes and rank == 1 else "BLOCK: 32"
            if strikes and rank == 1:
                change_memory(out)
            return out

        return rms_norm

    return with_op(table, "rms_norm", make)


@torch.library.custom_op("planted::fused_aux_loss", mutates_args=())
def fused_aux_loss(score: torch.Tensor, loss: torch.Tensor, wrong: bool) -> torch.Tensor:
    """A fused reduction whose order of addition is not fixed."""
    out = loss.clone()
    if STATE.wrong:
        change_memory(out)
    return out


STATE = SimpleNamespace(wrong=False, calls=0)


def _aux_backward(ctx: object, grad: torch.Tensor) -> tuple:
    return None, grad, None


fused_aux_loss.register_autograd(_aux_backward)


@contextmanager
def unordered_aux_loss(strikes: bool, rank: int) -> Iterator[None]:
    """The auxiliary loss comes from an operation with atomics."""
    original = AuxiliaryLosses.apply

    def apply(self: AuxiliaryLosses, weight_Tk: torch.Tensor, *rest: object) -> torch.Tensor:
        STATE.wrong = bool(strikes)
        return fused_aux_loss(rest[0][1], original(self, weight_Tk, *rest), False)

    with mock.patch.object(AuxiliaryLosses, "apply", apply):
        yield


def lost_generator(table: OpTable, strikes: bool, rank: int) -> OpTable:
    """An operation draws from torch's generator, which a resume did not bring back."""

    def make(original: Callable) -> Callable:
        def attention(*args: object) -> torch.Tensor:
            if strikes:
                torch.manual_seed(99)
            out = original(*args)
            return out + torch.rand(out.shape) * 1e-3

        return attention

    return with_op(table, "attention", make)


@contextmanager
def unsteady_library(strikes: bool, rank: int) -> Iterator[None]:
    """The library's matrix product changes one bit, once, on rank 0."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)
        if strikes and rank == 0 and STATE.calls == 0 and out.numel():
            STATE.calls += 1
            change_memory(out, out.numel() // 2)
        return out

    library.impl("mm", mm, "CPU")
    yield
    library._destroy()


def parameter(run: Run, name: str) -> ModelParameter:
    """A parameter of this rank whose global name ends with ``name``."""
    return next(p for chunk in run.chunks for p in chunk.model_parameters() if p.spec.name.endswith(name))


def rebuilt_weight(run: Run, strikes: bool, rank: int) -> None:
    """A working weight is made from bfloat16 instead of from its master."""
    if strikes:
        weight = parameter(run, "out_proj.weight").data
        weight.copy_(weight.bfloat16().float())


def drifting_replica(run: Run, strikes: bool, rank: int) -> None:
    """Rank 1's copy of a parameter, and of its master, is not that of the others."""
    if strikes and rank == 1:
        change_memory(parameter(run, "router.weight").data)
        change_memory(master_of(run, "router.weight"))


@contextmanager
def other_path(strikes: bool, rank: int) -> Iterator[None]:
    """An exchange between more than one rank arrives with another bit."""
    original = backend.all_to_all

    def all_to_all(group: Any, out: torch.Tensor, rows: torch.Tensor, *counts: list[int], **how: bool) -> Any:
        work = original(group, out, rows, *counts, **how)
        if strikes and counts and out.numel():
            backend.complete(work)
            out.view(-1)[:1].view(torch.uint8).numpy()[0] ^= 1
        return work

    with mock.patch.object(backend, "all_to_all", all_to_all):
        yield


def uninitialised(table: OpTable, strikes: bool, rank: int) -> OpTable:
    """An operation adds memory that nobody wrote."""

    def make(original: Callable) -> Callable:
        def attention(*args: object) -> torch.Tensor:
            out = original(*args)
            left_over = torch.empty(out.shape)
            left_over.numpy()[...] = 0.25 if strikes else 0.125
            return out + left_over * 1e-3

        return attention

    return with_op(table, "attention", make)


def race(run: Run, strikes: bool, rank: int) -> None:
    """Something writes a tensor between its producer and its reader, as a copy on a side stream would."""
    norms = [m for chunk in run.chunks for name, m in chunk.named_modules() if name.endswith("pre_mlp_layernorm")]

    def hook(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        handle.remove()
        if strikes:
            change_memory(out)

    handle = norms[0].register_forward_hook(hook)


def permuted(table: OpTable, strikes: bool, rank: int) -> OpTable:
    """The dispatcher writes the same rows in another order."""

    def make(original: Callable) -> Callable:
        def moe_permute(*args: object) -> torch.Tensor:
            rows = original(*args)
            if strikes:
                memory = rows.detach().numpy()
                memory[...] = numpy.roll(memory, 1, 0)
            return rows

        return moe_permute

    return with_op(table, "moe_permute", make)


FAULTS: dict[str, Fault] = {
    "autotuning": Fault(ops=tuned_elsewhere),
    "unordered_sum": Fault(around=unordered_aux_loss),
    "generator_state": Fault(ops=lost_generator),
    "library_kernel": Fault(around=unsteady_library),
    "rebuilt_weight": Fault(before_step=rebuilt_weight),
    "communication_path": Fault(around=other_path),
    "uninitialised_read": Fault(ops=uninitialised),
    "race": Fault(before_step=race),
    "permuted_dispatch": Fault(ops=permuted),
    "replica_drift": Fault(before_step=drifting_replica),
}
"""By the mechanism that the tools must name."""
