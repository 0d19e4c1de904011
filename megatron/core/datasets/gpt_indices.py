"""Which tokens make up which sample: document, sample and shuffle index, equal to Megatron's bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Tokens of a sample beyond its length: inputs are all but the last, labels all but the first.
EXTRA_TOKENS = 1
# A last epoch of which less than this share is needed is shuffled apart from the others.
_SEPARATE_BELOW = 0.80
# Rows of the sample index that are made at once: what they are made from takes several times their memory.
_ROW_BLOCK = 1 << 22

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How many epochs a request takes and how many samples they give.

    ``samples_before_last_epoch`` is set where the last epoch is shuffled apart.
    """

    sequence_length: int
    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    samples_before_last_epoch: int | None


@dataclass(frozen=True, kw_only=True)
class SampleIndices:
    """Sample i starts at row ``shuffle_index[i]`` of ``sample_index``.

    ``document_index`` int32: sequence numbers in the order in which their tokens are laid end to end.
    ``sample_index`` int32 (int64 where the numbers need it) [samples + 1, 2]: position in ``document_index`` and token
    offset there, of the first token of each sample.
    ``shuffle_index`` uint32 (int64 above 2^32 - 2): the order of the samples.
    """

    document_index: NDArray
    sample_index: NDArray
    shuffle_index: NDArray

    def arrays(self) -> Mapping[str, NDArray]:
        """The three arrays by name."""
        return {name: getattr(self, name) for name in INDEX_NAMES}


def plan_samples(tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> SamplePlan:
    """Epochs and samples for a request of ``num_samples``, or one epoch where it is ``None``.

    The plan has at least the samples asked for: whole epochs are always used up. Under ``None`` it may have none.

    Raises:
        ValueError: there are no tokens, so no number of epochs is enough.
    """
    if tokens_per_epoch < 1:
        raise ValueError("no tokens to make samples of")
    epochs = 1
    if num_samples is not None:
        wanted = num_samples * sequence_length + EXTRA_TOKENS
        epochs = max(1, -(-wanted // tokens_per_epoch))
    before_last = None
    if num_samples is not None and epochs > 1:
        without_last = ((epochs - 1) * tokens_per_epoch - EXTRA_TOKENS) // sequence_length
        per_epoch = (tokens_per_epoch - EXTRA_TOKENS) // sequence_length
        if num_samples - without_last < int(_SEPARATE_BELOW * per_epoch):
            before_last = without_last
    return SamplePlan(
        sequence_length=sequence_length,
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=epochs,
        num_samples=max(0, epochs * tokens_per_epoch - EXTRA_TOKENS) // sequence_length,
        samples_before_last_epoch=before_last,
    )


def build_indices(
    sequences: NDArray[np.int32], sequence_lengths: NDArray[np.int32], plan: SamplePlan, seed: int
) -> SampleIndices:
    """The three indices of a split.

    Args:
        sequences: numbers of the split's sequences.
        sequence_lengths: tokens of every sequence of the data set.
        plan: from ``plan_samples`` over the split's tokens.
        seed: of one MT19937 stream that serves the shuffles of documents, then of samples.
    """
    state = np.random.RandomState(seed)
    document_index = _document_index(sequences, plan, state)
    sample_index = build_sample_index(document_index, sequence_lengths, plan)
    shuffle_index = _shuffle_index(plan, state)
    return SampleIndices(document_index=document_index, sample_index=sample_index, shuffle_index=shuffle_index)


def build_sample_index(
    document_index: NDArray[np.int32], sequence_lengths: NDArray[np.int32], plan: SamplePlan
) -> NDArray:
    """Where each sample starts in the documents laid end to end; one row more than there are samples.

    Sample k covers tokens k*s .. k*s + s of that line, so neighbours share one token. The document that holds token
    k*s is the first whose cumulative length exceeds it; an empty document never is one. Row 0 is always (0, 0).
    """
    s, samples = plan.sequence_length, plan.num_samples
    lengths = sequence_lengths[document_index].astype(np.int64)
    ends = np.cumsum(lengths)
    largest = max(len(document_index), int(sequence_lengths.max(initial=0)))
    rows = np.zeros((samples + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    for first in range(1, samples + 1, _ROW_BLOCK):
        block = rows[first : first + _ROW_BLOCK]
        starts = np.arange(first, first + len(block), dtype=np.int64) * s
        positions = np.searchsorted(ends, starts, side="right")
        block[:, 0] = positions
        block[:, 1] = starts - (ends[positions] - lengths[positions])
    return rows


def _document_index(sequences: NDArray[np.int32], plan: SamplePlan, state: np.random.RandomState) -> NDArray[np.int32]:
    """Epochs are shuffled together, so a document may come twice before another comes once."""
    separate = plan.samples_before_last_epoch is not None
    together = np.tile(sequences.astype(np.int32), plan.num_epochs - separate)
    state.shuffle(together)
    if not separate:
        return together
    last = sequences.astype(np.int32)
    state.shuffle(last)
    return np.concatenate((together, last))


def _shuffle_index(plan: SamplePlan, state: np.random.RandomState) -> NDArray:
    total = plan.num_samples
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(total, dtype=dtype)
    border = total if plan.samples_before_last_epoch is None else plan.samples_before_last_epoch
    state.shuffle(index[:border])
    if border != total:
        state.shuffle(index[border:])
    return index
