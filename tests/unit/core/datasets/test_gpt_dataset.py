"""Samples: every token once, neighbours share one, masks and pads, and ids outside the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DamagedInputError
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleRules
from megatron.core.datasets.gpt_indices import build_indices, plan_samples
from megatron.core.datasets.index_cache import digested
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tests.support.data import write_documents, write_self_data


def _dataset(prefix: str, s: int, asked: int | None = None, mapped: bool = True, **rules) -> GPTDataset:
    source = IndexedDataset(prefix, mmap_bin=mapped)
    plan = plan_samples(source.num_tokens, s, asked)
    indices = build_indices(np.arange(len(source), dtype=np.int32), source.sequence_lengths, plan, seed=1234)
    rules = {"vocab_size": 65536, "eod": -5, "pad": -1, **rules}
    return GPTDataset(source, digested(indices.arrays()), SampleRules(sequence_length=s, **rules))


@pytest.mark.parametrize("mapped", [True, False])
def test_an_epoch_holds_every_token_once(tmp_path: Path, mapped: bool):
    lengths = (5, 3, 7, 1, 4, 9)
    data = write_self_data(tmp_path, lengths)
    dataset = _dataset(data.prefix, 4, mapped=mapped)
    order = dataset.indices.document_index.tolist()
    line = [data.token(d, p) for d in order for p in range(lengths[d])]
    samples = {int(dataset.indices.shuffle_index[i]): dataset.raw(i).tolist() for i in range(len(dataset))}
    assert [samples[k] for k in range(len(dataset))] == [line[4 * k : 4 * k + 5] for k in range(len(dataset))]
    assert len(dataset) == (sum(lengths) - 1) // 4


def test_items_are_shifted_copies_of_the_raw_ids(tmp_path: Path):
    data = write_self_data(tmp_path, (30, 20))
    dataset = _dataset(data.prefix, 8)
    for i in range(len(dataset)):
        item, raw = dataset[i], dataset.raw(i)
        assert item["tokens"].tolist() == raw[:-1].tolist()
        assert item["labels"].tolist() == raw[1:].tolist()
        assert item["position_ids"].tolist() == list(range(8))
        assert item["loss_mask"].tolist() == [1.0] * 8
        assert [item[k].dtype for k in ("tokens", "labels", "position_ids", "loss_mask")] == [np.int64] * 3 + [
            np.float32
        ]


def test_items_can_be_changed_without_changing_the_data(tmp_path: Path):
    dataset = _dataset(write_self_data(tmp_path, (9,)).prefix, 8)
    for array in dataset[0].values():
        array[:] = 7
    assert dataset[0]["tokens"].tolist() == list(range(8))


def test_masks(tmp_path: Path):
    write_documents(str(tmp_path / "d"), [[1, 9, 2, 3, 9, 0, 4, 9, 5]])
    plain = _dataset(str(tmp_path / "d"), 8, eod=9)[0]
    assert plain["loss_mask"].tolist() == [1] * 8
    masked = _dataset(str(tmp_path / "d"), 8, eod=9, eod_mask_loss=True)[0]
    assert masked["loss_mask"].tolist() == [1, 0, 1, 1, 0, 1, 1, 0]
    padded = _dataset(str(tmp_path / "d"), 8, eod=2, pad=9, eod_mask_loss=True)[0]
    assert padded["loss_mask"].tolist() == [0, 1, 0, 0, 1, 1, 0, 1]
    assert padded["tokens"].tolist() == [1, 0, 2, 3, 0, 0, 4, 0]
    assert padded["labels"].tolist() == [0, 2, 3, 0, 0, 4, 0, 5]


@pytest.mark.parametrize("wrong", [600, 512, -1])
def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path, wrong: int):
    write_documents(str(tmp_path / "d"), [[1, 2, 3], [4, 511, wrong, 7, 8, 9]], vocab_size=70000)
    dataset = _dataset(str(tmp_path / "d"), 8, vocab_size=512)
    message = rf"{tmp_path}/d: token id {wrong} at position 2 of document 1 is outside the vocabulary of 512 ids"
    for read in (lambda: dataset[0], lambda: dataset.raw(0)):
        with pytest.raises(DamagedInputError, match=message):
            read()
    unchecked = _dataset(str(tmp_path / "d"), 8, vocab_size=None)
    assert wrong in unchecked.raw(0).tolist()


def test_no_sample_outside_the_range(tmp_path: Path):
    dataset = _dataset(write_self_data(tmp_path, (30,)).prefix, 8)
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {i} of 3"):
            dataset[i]
