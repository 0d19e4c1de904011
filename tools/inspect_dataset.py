"""Show what training would read: digests of the sample indices, numbers of samples, and raw samples.

    python tools/inspect_dataset.py --data-path corpus_text_document --split 969,30,1 --seq-length 64 --seed 1234 \
        --train-samples 1000 --samples 0,1,7 --json

Nothing is written. Digests are SHA-256 of the raw little-endian arrays (document_index int32, sample_index int32
[n + 1, 2], shuffle_index uint32). A split without data is null. Exit codes: 0 shown, 2 refused, 3 data damaged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.splits import requested_sizes
from megatron.training.config.data import NO_SOURCE, DataConfig, TokenizerConfig
from megatron.training.data.provider import Dataset, Splits, build_datasets, tokenizer_from
from tools.command_line import add_flags, config_from, run_tool

# The settings of the data that decide which samples there are.
_DATA_FIELDS = (
    "data_path",
    "split",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
    "mmap_bin_files",
    "num_dataset_builder_threads",
    "mid_level_dataset_surplus",
)
_TOKENIZER_FIELDS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tokenizer_special_tokens",
    "null_tokenizer_eod_id",
    "null_tokenizer_pad_id",
)


def describe(data: Dataset | None, samples: Sequence[int]) -> dict[str, Any] | None:
    """Digests, number of samples and the raw ids of ``samples`` of one split; ``None`` for a split without data.

    A sample beyond the end of the split is ``None``. A blend has the digests of its own two indices, and its members.
    """
    if data is None:
        return None
    shown: dict[str, Any] = {**data.index_digests, "num_samples": len(data)}
    shown["samples"] = [data.raw(i).tolist() if i < len(data) else None for i in samples]
    if isinstance(data, BlendedDataset):
        shown["members"] = [{"path": m.source.path, **(describe(m, ()) or {})} for m in data.members]
    return shown


def parser() -> argparse.ArgumentParser:
    """The command line; names are those of training."""
    made = argparse.ArgumentParser(
        prog="inspect_dataset.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add_flags(made, DataConfig, only=_DATA_FIELDS)
    add_flags(made, TokenizerConfig, only=_TOKENIZER_FIELDS)
    made.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens per sample")
    made.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the data order")
    made.add_argument("--train-samples", type=int, metavar="N", help="samples that training asks for")
    made.add_argument("--train-iters", type=int, metavar="N", help="instead: iterations of --global-batch-size samples")
    made.add_argument("--global-batch-size", type=int, metavar="N", help="samples per iteration")
    made.add_argument(
        "--eval-iters", type=int, metavar="N", help="batches per evaluation; default: all of valid and test"
    )
    made.add_argument("--eval-interval", type=int, metavar="N", help="iterations between evaluations")
    made.add_argument("--samples", default="", metavar="I,J,...", help="samples to show as raw token ids")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code."""
    arguments = parser().parse_args(argv)
    problems = _problems(arguments)
    data, tokenizer_config = config_from(DataConfig, arguments), config_from(TokenizerConfig, arguments)
    wants_tokenizer = tokenizer_config != TokenizerConfig()
    problems += data.problems() if data.given_sources() else [NO_SOURCE]
    problems += tokenizer_config.problems() if wants_tokenizer else []
    if problems:
        raise ConfigError(problems)
    splits = build_datasets(
        data,
        tokenizer_from(tokenizer_config) if wants_tokenizer else None,
        sequence_length=arguments.seq_length,
        seed=arguments.seed,
        sizes=_sizes(arguments),
        turn="run",
        meet=lambda wrong: wrong,
        use_cache=False,
    )
    samples = [int(word) for word in arguments.samples.split(",") if word]
    largest = max((len(d) for d in splits.by_name().values() if d is not None), default=0)
    beyond = [i for i in samples if i >= largest]
    if beyond:
        raise ConfigError([Problem(f"--samples {beyond[0]}", f"below {largest}, the largest split", "--samples")])
    shown = {name: describe(split, samples) for name, split in splits.by_name().items()}
    print(json.dumps(shown) if arguments.json else _table(shown, splits))
    return 0


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found = []
    for name in ("seq_length", "train_samples", "train_iters", "global_batch_size", "eval_interval"):
        value, flag = getattr(arguments, name), "--" + name.replace("_", "-")
        if value is not None and value < 1:
            found.append(Problem(f"{flag} {value}", "at least 1", flag))
    if arguments.eval_iters is not None and arguments.eval_iters < 0:
        found.append(Problem(f"--eval-iters {arguments.eval_iters}", "at least 0", "--eval-iters"))
    if not 0 <= arguments.seed < 2**32:
        found.append(Problem(f"--seed {arguments.seed}", "0 to 2^32 - 1", "--seed"))
    if (arguments.train_samples is None) == (arguments.train_iters is None):
        found.append(
            Problem(
                f"--train-samples {arguments.train_samples} and --train-iters {arguments.train_iters}",
                "one of the two: the number of samples decides their order",
                "--train-samples",
            )
        )
    needs_batch = [f for f in ("train_iters", "eval_iters", "eval_interval") if getattr(arguments, f) is not None]
    if needs_batch and arguments.global_batch_size is None:
        flag = "--" + needs_batch[0].replace("_", "-")
        found.append(Problem(f"{flag} without a batch size", "samples per iteration", "--global-batch-size"))
    if not re.fullmatch(r"(\d{1,18}(,\d{1,18})*)?", arguments.samples):
        found.append(Problem(f"--samples {arguments.samples}", "numbers separated by commas", "--samples"))
    return found


def _sizes(arguments: argparse.Namespace) -> tuple[int | None, int | None, int | None]:
    batch = arguments.global_batch_size
    train = arguments.train_samples or arguments.train_iters * batch
    if arguments.eval_iters is None:
        return train, None, None
    train, valid, test = requested_sizes(
        train_samples=train,
        train_iters=arguments.train_iters or train // batch,
        eval_iters=arguments.eval_iters,
        eval_interval=arguments.eval_interval,
        global_batch_size=batch,
    )
    return train, valid if arguments.eval_interval is not None else None, test


def _table(shown: dict[str, Any], splits: Splits) -> str:
    lines = []
    for name, facts in shown.items():
        if facts is None:
            lines.append(f"{name}: no data: {splits.absent[name].reason}")
            continue
        lines.append(f"{name}: {facts['num_samples']} samples")
        lines += [f"  {key:20} {value}" for key, value in facts.items() if key.endswith("_index")]
        lines += [f"  member {m['path']}: {m['num_samples']} samples" for m in facts.get("members", ())]
        lines += [f"  {ids}" for ids in facts["samples"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
