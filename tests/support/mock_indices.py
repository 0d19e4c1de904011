"""The sample indices of the mock data, made once for a process and for those forked from it.

Mock data has 100,000 documents. At the short sequences of tests their indices take longer than the steps of a test, and
every rank of every run makes them. What is handed out again is what was made before from the same arguments.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_indices import SampleIndices, SamplePlan
from megatron.training.cli.parser import parse_run_config
from megatron.training.data import provider
from megatron.training.data.provider import tokenizer_from

Build = Callable[[NDArray[np.int32], NDArray[np.int32], SamplePlan, int], SampleIndices]
LARGE = 50_000
"""Documents from which on indices are kept."""


def remembering(build: Build) -> Build:
    """``build_indices`` that keeps what it made of many documents; kept arrays cannot be written to."""
    made: dict[tuple[bytes, SamplePlan, int], SampleIndices] = {}

    @functools.wraps(build)
    def build_or_remember(
        sequences: NDArray[np.int32], sequence_lengths: NDArray[np.int32], plan: SamplePlan, seed: int
    ) -> SampleIndices:
        if len(sequence_lengths) < LARGE:
            return build(sequences, sequence_lengths, plan, seed)
        key = (hashlib.sha256(sequences.tobytes() + sequence_lengths.tobytes()).digest(), plan, seed)
        if key not in made:
            made[key] = build(sequences, sequence_lengths, plan, seed)
            for array in made[key].arrays().values():
                array.flags.writeable = False
        return made[key]

    return build_or_remember


def remember_indices() -> None:
    """From here on this process keeps large indices."""
    provider.build_indices = remembering(provider.build_indices)


def make_mock_data(flags: str, sequence_lengths: tuple[int, ...]) -> None:
    """Make the indices of the mock data that the command line ``flags`` asks for, at these lengths."""
    config = parse_run_config(shlex.split(flags))
    for sequence_length in sequence_lengths:
        provider.build_datasets(
            config.data,
            tokenizer_from(config.tokenizer),
            sequence_length=sequence_length,
            seed=config.training.seed,
            sizes=(1, 1, 1),
            turn="run",
            meet=lambda wrong: wrong,
        )
