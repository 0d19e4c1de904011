"""Settings of the training data and of the tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.fields import operational, trajectory
from megatron.core.datasets.blended import parse_blend
from megatron.core.datasets.splits import split_problems
from megatron.core.tokenizers.build import TokenizerChoice, tokenizer_problems

PER_SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")

NO_SOURCE = Problem(
    "neither --data-path nor --mock-data",
    "what to train on: data sets, or counting sequences made in memory for a trial",
    "add --data-path PREFIX..., or --mock-data",
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are cut into splits."""

    data_path: tuple[str, ...] | None = operational(None)
    """Prefix of a .bin/.idx pair, several prefixes, or pairs "weight prefix weight prefix". What they hold enters the
    comparison of runs as a digest, not as a path."""
    split: str | None = trajectory(None)
    """Shares of train, valid and test, for instance 969,30,1 (the default with --data-path); mock data is always cut
    1,1,1."""
    train_data_path: tuple[str, ...] | None = operational(None)
    """Training data only, spelled as --data-path; instead of --data-path and --split."""
    valid_data_path: tuple[str, ...] | None = operational(None)
    """Validation data only, spelled as --data-path."""
    test_data_path: tuple[str, ...] | None = operational(None)
    """Test data only, spelled as --data-path."""
    data_args_path: str | None = operational(None)
    """File that holds the value of --data-path, separated by white space."""
    per_split_data_args_path: str | None = operational(None)
    """JSON file with the lists "train", "valid" and "test", each spelled as --data-path."""
    data_cache_path: str | None = operational(None)
    """Folder for sample indices; default: PREFIX/cache/GPTDataset_indices beside each data set."""
    mock_data: bool = trajectory(False)
    """Train on counting sequences made in memory instead of files."""
    num_workers: int = operational(2)
    """Threads that read samples ahead of the step; 0 reads them when they are needed. Never changes a sample."""
    dataloader_type: Literal["single", "cyclic", "external"] = trajectory("single")
    """single: samples in index order, once; cyclic: reshuffled each epoch, without end. external is refused."""
    data_sharding: bool = trajectory(True, flags=("--no-data-sharding",), negates=True)
    """Shuffling within the part of each logical rank, with --dataloader-type cyclic. When off, over all
    samples."""
    eod_mask_loss: bool = trajectory(False)
    """No loss at positions whose input is the end-of-document token."""
    mmap_bin_files: bool = operational(True)
    """Mapping .bin files into memory. When off, pieces of them are read."""
    create_attention_mask_in_dataloader: bool = operational(True)
    """A mask made beside each sample. Without effect on or off: attention is causal by construction, and no mask is
    ever made or moved."""
    num_dataset_builder_threads: int = operational(1)
    """Threads that build the indices of the members of a blend."""
    mid_level_dataset_surplus: float = trajectory(0.005)
    """Share of samples indexed beyond the request in each member of a weighted blend."""
    allow_ambiguous_pad_tokens: bool = trajectory(False)
    """Mask the pad token's id out of the loss even where it is also the id of another special token."""

    def given_sources(self) -> list[str]:
        """Flags of the data sources that were given; at most one kind may be."""
        given = {
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
        }
        return [flag for flag, value in given.items() if value]

    def problems(self) -> list[Problem]:
        """Everything about these settings that cannot work, without looking at a file."""
        found = list(self._source_problems())
        if self.split is not None:
            found += split_problems(self.split)
        if self.dataloader_type == "external":
            found.append(
                Problem(
                    "--dataloader-type external",
                    "a loader whose order is a function of seed and consumed samples; an external one promises nothing",
                    "--dataloader-type single or cyclic",
                )
            )
        if not self.data_sharding and self.dataloader_type != "cyclic":
            found.append(
                Problem("--no-data-sharding", "--dataloader-type cyclic, which it modifies", "--dataloader-type cyclic")
            )
        floors = {"num_workers": 0, "num_dataset_builder_threads": 1, "mid_level_dataset_surplus": 0}
        for name, floor in floors.items():
            value = getattr(self, name)
            if not value >= floor:
                flag = "--" + name.replace("_", "-")
                found.append(Problem(f"{flag} {value}", f"at least {floor}", flag))
        return found

    def _source_problems(self) -> list[Problem]:
        given = self.given_sources()
        per_split = [flag for flag in given if flag in PER_SPLIT_FLAGS]
        kinds = [flag for flag in given if flag not in PER_SPLIT_FLAGS] + ["/".join(per_split)] * bool(per_split)
        found = []
        if len(kinds) > 1:
            found.append(Problem(" and ".join(kinds), "one source of data", "leave out all but one of these flags"))
        elif self.split is not None and (per_split or self.per_split_data_args_path):
            found.append(
                Problem(
                    f"--split {self.split} with data paths per split",
                    "--split only where one source is cut into three",
                    "leave out --split",
                )
            )
        for flag in ("--data-path", *PER_SPLIT_FLAGS):
            found += _blend_problems(getattr(self, flag[2:].replace("-", "_")), flag)
        return found


def _blend_problems(words: tuple[str, ...] | None, flag: str) -> tuple[Problem, ...]:
    try:
        parse_blend(words or (), flag)
    except ConfigError as error:
        return error.problems
    return ()


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer and the size of the vocabulary."""

    tokenizer_type: str | None = trajectory(None)
    """ByteTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, NullTokenizer, TikTokenizer, or one of the names for a
    SentencePiece model: SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer."""
    tokenizer_model: str | None = operational(None)
    """A Hugging Face tokenizer.json or its folder, a SentencePiece .model file, or a tiktoken vocabulary in JSON."""
    vocab_file: str | None = operational(None)
    """The vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = operational(None)
    """The merges.txt of GPT2BPETokenizer."""
    vocab_size: int | None = trajectory(None)
    """Vocabulary of NullTokenizer; of TikTokenizer the ids that are kept, special ones included (131,072 when not
    given); for the others a larger vocabulary than the tokenizer's own."""
    tiktoken_pattern: str | None = trajectory(None)
    """How TikTokenizer cuts text before merging: v1 or v2 (when not given)."""
    tiktoken_num_special_tokens: int | None = trajectory(None)
    """Ids of TikTokenizer that are special tokens; 1,000 when not given."""
    tokenizer_special_tokens: tuple[str, ...] | None = trajectory(
        None, flags=("--tokenizer-special-tokens", "--tiktoken-special-tokens")
    )
    """Names of TikTokenizer's special tokens from 0 on; <unk> <s> </s> <mask> <pad> <cls> <sep> when not given. The
    rest is filled with <SPECIAL_7> and so on."""
    null_tokenizer_eod_id: int | None = trajectory(None)
    """End-of-document id of NullTokenizer; default: vocabulary size - 1."""
    null_tokenizer_pad_id: int = trajectory(-1)
    """Pad id of NullTokenizer; -1: none."""
    make_vocab_size_divisible_by: int = trajectory(128)
    """The vocabulary is padded to a multiple of this times the logical tensor-parallel size. Padding rows take no part
    in the loss."""
    padded_vocab_size: int | None = trajectory(None)
    """Rows of the embedding; default: the vocabulary rounded up as above."""
    pad_vocab_size: bool = trajectory(True)
    """Padding of the vocabulary. When off, the tensor-parallel size must divide it."""

    def files(self) -> dict[str, str]:
        """The files that the tokenizer is read from, by flag, as far as they are given."""
        named = {
            "--tokenizer-model": self.tokenizer_model,
            "--vocab-file": self.vocab_file,
            "--merge-file": self.merge_file,
        }
        return {flag: path for flag, path in named.items() if path}

    def choice(self) -> TokenizerChoice:
        """What ``build_tokenizer`` takes."""
        return TokenizerChoice(
            kind=self.tokenizer_type,
            model=self.tokenizer_model,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            vocab_size=self.vocab_size,
            eod_id=self.null_tokenizer_eod_id,
            pad_id=self.null_tokenizer_pad_id,
            pattern=self.tiktoken_pattern,
            num_special=self.tiktoken_num_special_tokens,
            special_tokens=self.tokenizer_special_tokens,
        )

    def problems(self) -> list[Problem]:
        """Everything about these settings that cannot work, without looking at a file."""
        found = tokenizer_problems(self.choice())
        if self.make_vocab_size_divisible_by < 1:
            found.append(
                Problem(
                    f"--make-vocab-size-divisible-by {self.make_vocab_size_divisible_by}",
                    "at least 1",
                    "--make-vocab-size-divisible-by",
                )
            )
        if self.padded_vocab_size is not None and not self.pad_vocab_size:
            found.append(
                Problem(
                    f"--padded-vocab-size {self.padded_vocab_size} and --no-pad-vocab-size",
                    "one statement about padding",
                    "leave out one of the two",
                )
            )
        return found


def padded_vocabulary(config: TokenizerConfig, vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding for a vocabulary of ``vocab_size`` ids under ``tensor_parallel`` logical ranks.

    ``vocab_size`` rounded up to a multiple of ``make_vocab_size_divisible_by * tensor_parallel``, unless the
    configuration states the number or switches padding off.

    Raises:
        ConfigError: the stated number is too small, or tensor parallelism does not divide the result.
    """
    if config.padded_vocab_size is not None:
        rows, change = config.padded_vocab_size, "--padded-vocab-size"
    elif config.pad_vocab_size:
        multiple = config.make_vocab_size_divisible_by * tensor_parallel
        rows, change = math.ceil(vocab_size / multiple) * multiple, "--make-vocab-size-divisible-by"
    else:
        rows, change = vocab_size, "--no-pad-vocab-size"
    problems = []
    if rows < vocab_size:
        problems.append(
            Problem(f"{change} {rows}", f"at least the {vocab_size} ids of the tokenizer's vocabulary", change)
        )
    if rows % tensor_parallel:
        problems.append(
            Problem(
                f"{rows} embedding rows under --tensor-model-parallel-size {tensor_parallel}",
                f"rows that {tensor_parallel} divides",
                change,
            )
        )
    if problems:
        raise ConfigError(problems)
    return rows
