"""A small command line that is accepted, and configurations made from it."""

from __future__ import annotations

import shlex

from megatron.training.cli.parser import parse_run_config
from megatron.training.config.resolve import resolve_vocabulary
from megatron.training.config.run import RunConfig
from megatron.training.config.validate import resolve_and_validate

SMALL = shlex.split("""
    --hybrid-layer-pattern M-*E --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --mamba-num-groups 2 --mamba-head-dim 16 --num-experts 4
    --disable-bias-linear --untie-embeddings-and-output-weights
    --micro-batch-size 1 --lr 1e-3 --train-iters 3 --tokenizer-type ByteTokenizer --mock-data
""")
"""One layer of each kind; runs on any number of processes without further flags."""


def given(*more: str) -> RunConfig:
    """The small command line with more flags, as given."""
    return parse_run_config([*SMALL, *more])


def effective(*more: str, world_size: int = 1, vocab_size: int = 258) -> RunConfig:
    """The same, resolved and checked, with the vocabulary known."""
    return resolve_vocabulary(resolve_and_validate(given(*more), world_size), vocab_size)
