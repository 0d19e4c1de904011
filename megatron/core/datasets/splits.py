"""How one data set is cut into train, valid and test, and how many samples each is asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron.core.config.errors import ConfigError, Problem

SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
MOCK_SPLIT = "1,1,1"

Bookends = tuple[float, float]


def normalize(weights: Sequence[float]) -> list[float]:
    """``weights`` divided by their sum, in float64 with NumPy's order of addition (as Megatron's)."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_problems(split: str) -> list[Problem]:
    """What is wrong with the text of ``--split``; empty where it can be used."""
    given, change = f"--split {split!r}", "--split, for instance 969,30,1"
    picked = re.findall(r"-?[.0-9]+", split)
    try:
        shares = [float(text) for text in picked]
    except ValueError:
        return [Problem(given, "up to three plain numbers", change)]
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or "-" in split:
        found = ", ".join(picked) or "none"
        return [Problem(given, f"one to three numbers of 0 or more, found {found}", change)]
    if not 0 < sum(shares) < math.inf:
        return [Problem(given, "at least one share above 0, and a finite sum", change)]
    return []


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test, adding up to 1. Missing ones are 0.

    Every number in the text counts, whatever stands between them.

    Raises:
        ConfigError: see ``split_problems``.
    """
    problems = split_problems(split)
    if problems:
        raise ConfigError(problems)
    shares = [float(text) for text in re.findall(r"[.0-9]+", split)]
    return normalize(shares + [0.0] * (len(SPLIT_NAMES) - len(shares)))


def split_matrix(shares: Sequence[float]) -> list[Bookends | None]:
    """(low, high) of each split as fractions of the data set; ``None`` for a split without width.

    The running sum starts from the integer 0, which shows in the text that names cached indices.
    """
    borders: list[float] = [0]
    for share in shares:
        borders.append(borders[-1] + share)
    return [None if high <= low else (low, high) for low, high in pairwise(borders)]


def sequence_range(bookends: Bookends, num_sequences: int) -> tuple[int, int]:
    """First and past-the-last sequence of a split; ties round to even, as Python's ``round`` does."""
    low, high = bookends
    return round(low * float(num_sequences)), round(high * float(num_sequences))


def requested_sizes(
    *,
    train_samples: int,
    train_iters: int,
    eval_iters: int,
    eval_interval: int | None,
    global_batch_size: int,
    start_eval_at_iter: int | None = None,
    eval_global_batch_size: int | None = None,
    full_validation: bool = False,
) -> tuple[int, int | None, int]:
    """Samples that training asks of train, valid and test.

    Valid: one evaluation per ``eval_interval`` iterations and one at the end, ``eval_iters`` batches each; none where
    ``eval_interval`` is ``None``, and none before ``start_eval_at_iter``. With ``full_validation`` it is ``None``: one
    epoch. Test: ``eval_iters`` batches. These batches have ``eval_global_batch_size`` samples, if it is given.
    """
    evaluations = 0
    if eval_interval is not None:
        start = start_eval_at_iter or 0
        happening = -(-train_iters // eval_interval) - (max(start, 1) - 1) // eval_interval
        # Megatron's number, on which the order of the samples depends, unless it is too small.
        evaluations = max(train_iters // eval_interval + 1 - start // eval_interval, happening, 1)
    batch = eval_iters * (eval_global_batch_size or global_batch_size)
    everything = full_validation and eval_interval is not None
    return train_samples, None if everything else evaluations * batch, batch
