"""The least and the largest token id of a data set: found by reading the whole .bin file once, then kept in a cache."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets.index_cache import CacheEntry
from megatron.core.datasets.indexed_dataset import IndexedDataset

logger = logging.getLogger(__name__)

RANGE_NAMES = ("token_range",)
_WORTH_A_WORD = 1 << 32
"""Bytes of a .bin file from which on its reading is announced: it takes a second or more a gigabyte."""


def require_ids_within(dataset: IndexedDataset, vocab_size: int, cache: CacheEntry, remedy: str) -> None:
    """Every id in the data set's file, whether a run would reach it or not, is one of the vocabulary's.

    The range comes from ``cache`` where it holds that of this very file, else the file is read, and the range kept
    there if the folder can be written.

    Args:
        remedy: what to change, the end of the error's text.

    Raises:
        DamagedInputError: an id is not; names the least or largest one, the first place it stands at, and the file.
    """
    for number, token in _token_range(dataset, cache).tolist():
        if not 0 <= number < vocab_size:
            sequence, offset = dataset.place_of(token)
            raise DamagedInputError(
                f"{dataset.name}.bin: token id {number} at position {offset} of document "
                f"{dataset.document_of(sequence)} is outside the vocabulary of {vocab_size} ids; {remedy}"
            )


def _token_range(dataset: IndexedDataset, cache: CacheEntry) -> NDArray[np.int64]:
    try:
        found = cache.load()
    except DamagedInputError as error:
        logger.warning("%s; %s.bin is read again", error, dataset.name)
        found = None
    if found is not None:
        return found.arrays[RANGE_NAMES[0]]
    size = dataset.num_tokens * dataset.dtype.itemsize
    if size >= _WORTH_A_WORD:
        logger.warning("reading the %.0f GB of %s.bin once, for ids outside the vocabulary", size / 1e9, dataset.name)
    made = dataset.id_range()
    try:
        cache.store({RANGE_NAMES[0]: made})
    except OSError as error:
        logger.warning("%s: not kept, so that the next run reads %s.bin again", error, dataset.name)
    return made
