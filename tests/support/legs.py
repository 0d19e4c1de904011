"""Legs of a run in the rank pool: a command line trained from start to end, in fresh processes, without torchrun."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from megatron.core.config.errors import ConfigError, DamagedInputError, SaveFailedError, TrainingStoppedError
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.core.process_groups.groups import create_process_groups
from megatron.training.config.resolve import resolve_vocabulary, topology_of
from megatron.training.data.provider import tokenizer_from
from megatron.training.loop.build import assemble_run, params_dtype
from megatron.training.loop.pretrain import run_training
from megatron.training.loop.step import TrainStep
from megatron.training.observe.step_record import StepMetrics
from megatron.training.setup.command_line import start_up
from megatron.training.setup.environment import Launch
from tests.support.data import write_self_data
from tests.support.ranks import run_ranks

SMALL = """
    --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8
    --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4
    --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 512 --make-vocab-size-divisible-by 8
    --train-iters 8 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0
    --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style cosine
    --eval-interval 3 --eval-iters 1 --deterministic-mode
"""
"""Every part of the state; pattern and dropout are added by ``leg_flags``."""

_CPU = torch.device("cpu")


def leg_flags(words: str) -> list[str]:
    """The whole command line of a leg: the given flags, and those of the small recipe that they do not set.

    ``!--name`` is no flag: the recipe's ``--name`` and its values are left out.
    """
    given = shlex.split(words)
    flags = _without(shlex.split(SMALL), {word[1:] for word in given if word.startswith("!")})
    flags += [word for word in given if not word.startswith("!")]
    if "--hybrid-layer-pattern" not in flags:
        flags += ["--hybrid-layer-pattern", "M*|E-" if "--pipeline-model-parallel-size" in flags else "M*E-"]
    for name in ("--hidden-dropout", "--attention-dropout"):
        flags += [] if name in flags else [name, "0"]
    return flags


def _without(flags: list[str], names: set[str]) -> list[str]:
    kept, skipping = [], False
    for word in flags:
        skipping = word in names if word.startswith("--") else skipping
        kept += [] if skipping else [word]
    return kept


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Goes with this process."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _data(name: str, documents: int) -> str:
    """A data set of one sample a document, made once."""
    return write_self_data(Path(_folder().name), [17] * documents, name=name, vocab_size=512).prefix


def blended() -> str:
    """The flags of two small data sets in unequal shares, each begun again several times within 32 samples."""
    return f"--data-path 0.7 {_data('most', 15)} 0.3 {_data('some', 6)} --split 2,1,0"


def with_data(words: str) -> str:
    """The flags of a leg with those of the small data set, where they name no other data."""
    others = "--data-path" in words or "--mock-data" in words
    return words if others else f"{words} --data-path {_data('self', 30)} --split 2,1,0"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a leg ended on one rank: the exit code it would have had, what it said, what it printed."""

    code: int
    error: str
    out: str


def leg(words: str, before: Callable[[], None] | None = None) -> Ended:
    """Rank function: one leg. ``before`` is called first, in the rank's process, for instance to plant a fault."""
    draw_in_every_step()
    if before is not None:
        before()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            _run(leg_flags(words))
        except (ConfigError, DamagedInputError, SaveFailedError, TrainingStoppedError) as error:
            return Ended(code=error.exit_code, error=str(error), out=out.getvalue())
    return Ended(code=0, error="", out=out.getvalue())


def draw_in_every_step() -> None:
    """Stand in for users' code that draws from the generators: rank r draws r + 1 numbers from each before each step,
    so that no two ranks, and no two steps, have the same states. Training itself draws from keys only."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = TrainStep.run

    def drawing(self: TrainStep, *args: object, **kwargs: object) -> StepMetrics:
        for _ in range(rank + 1):
            random.random()
            random.gauss(0.0, 1.0)
            numpy.random.standard_normal()
            torch.rand(())
        return step(self, *args, **kwargs)

    TrainStep.run = drawing


def _run(argv: list[str]) -> None:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    config = start_up(argv, environment).config
    tokenizer = tokenizer_from(config.tokenizer)
    config = resolve_vocabulary(config, tokenizer.vocab_size)
    groups = create_process_groups(topology_of(config, world), _CPU)
    ops = build_table(ALL_OPS, config.numerics, _CPU, params_dtype(config))
    run = assemble_run(config, tokenizer, ops, groups, Launch(rank=rank, world_size=world), "gloo")
    run_training(run, time.monotonic())


def run_legs(world: int, words: str, before: Callable[[], None] | None = None) -> list[Ended]:
    """One leg on ``world`` fresh ranks."""
    return run_ranks(world, leg, with_data(words), before)


def finished(world: int, words: str) -> str:
    """One leg that ends well; what the first rank printed.

    Raises:
        AssertionError: it did not.
    """
    ranks = run_legs(world, words)
    assert all(rank.code == 0 for rank in ranks), "\n".join(f"{rank.code} {rank.error}" for rank in ranks)
    return ranks[0].out
