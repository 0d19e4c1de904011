"""Data and tokenizer settings: contradictions are listed, and the padded vocabulary."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.fields import flags_of
from megatron.training.config.data import DataConfig, TokenizerConfig, padded_vocabulary


def test_defaults_have_no_problem():
    assert DataConfig().problems() == []
    assert DataConfig(train_data_path=("a",), valid_data_path=("b",)).problems() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_path": ("a",), "mock_data": True}, "--data-path and --mock-data"),
        ({"data_path": ("a",), "train_data_path": ("b",)}, "--data-path and --train-data-path"),
        ({"data_args_path": "a", "per_split_data_args_path": "b"}, "one source of data"),
        ({"train_data_path": ("a",), "split": "1,1,1"}, "leave out --split"),
        ({"data_path": ("0.7", "a", "0.3")}, "'0.3' is a weight with no prefix behind it"),
        ({"valid_data_path": ("0.7", "a", "b", "c")}, "--valid-data-path"),
        ({"data_path": ("a",), "split": "a,b"}, "found none"),
        ({"data_path": ("a",), "split": "0"}, "at least one share"),
        ({"dataloader_type": "external"}, "promises nothing"),
        ({"data_sharding": False}, "--dataloader-type cyclic"),
        ({"num_workers": -1}, "--num-workers"),
        ({"num_dataset_builder_threads": 0}, "--num-dataset-builder-threads"),
        ({"mid_level_dataset_surplus": float("nan")}, "--mid-level-dataset-surplus"),
    ],
)
def test_problems(settings, message):
    (problem,) = DataConfig(**settings).problems()
    assert message in str(problem)


def test_all_problems_are_listed():
    config = DataConfig(data_path=("a",), mock_data=True, split="x", num_workers=-1, dataloader_type="external")
    assert len(config.problems()) == 4


@pytest.mark.parametrize(
    ("settings", "vocab_size", "tensor_parallel", "rows"),
    [
        ({}, 50257, 1, 50304),
        ({}, 50257, 2, 50432),
        ({}, 512, 4, 512),
        ({"make_vocab_size_divisible_by": 1}, 509, 2, 510),
        ({"padded_vocab_size": 640}, 509, 2, 640),
        ({"pad_vocab_size": False}, 510, 2, 510),
    ],
)
def test_padded_vocabulary(settings, vocab_size, tensor_parallel, rows):
    assert padded_vocabulary(TokenizerConfig(**settings), vocab_size, tensor_parallel) == rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_vocab_size": False}, "rows that 2 divides"),
        ({"padded_vocab_size": 511}, "rows that 2 divides"),
        ({"padded_vocab_size": 508}, "at least the 509 ids"),
    ],
)
def test_padded_vocabulary_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        padded_vocabulary(TokenizerConfig(**settings), 509, 2)


def test_tokenizer_problems():
    config = TokenizerConfig(
        tokenizer_type="ByteTokenizer", padded_vocab_size=1, pad_vocab_size=False, make_vocab_size_divisible_by=0
    )
    assert len(config.problems()) == 2
    assert TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5).problems() == []
    assert len(TokenizerConfig().problems()) == 1


def test_paths_are_not_part_of_what_runs_are_compared_by():
    effects = {flag.name: flag.effect for cls in (DataConfig, TokenizerConfig) for flag in flags_of(cls)}
    assert {effects[name] for name in effects if "path" in name or name == "tokenizer_model"} == {"operational"}
    assert {effects[n] for n in ("split", "eod_mask_loss", "dataloader_type", "vocab_size")} == {"trajectory"}
    assert len(effects) == len(dataclasses.fields(DataConfig)) + len(dataclasses.fields(TokenizerConfig))
