"""From the name of a tokenizer type to a tokenizer, or to the reasons why not."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.tokenizers.base import NO_PAD, Tokenizer
from megatron.core.tokenizers.byte import ByteTokenizer
from megatron.core.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import (
    DEFAULT_NUM_SPECIAL,
    PATTERNS,
    SPECIAL_TOKENS,
    TikTokenizer,
    special_token_problems,
)

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
MODEL_FILES = {
    "HuggingFaceTokenizer": "a tokenizer.json or its folder",
    "TikTokenizer": "a tiktoken vocabulary in JSON",
    **dict.fromkeys(SENTENCEPIECE_TYPES, "a SentencePiece .model file"),
}
"""Types that are read from ``--tokenizer-model``, and what it is then."""

TOKENIZER_TYPES = ("ByteTokenizer", "GPT2BPETokenizer", "NullTokenizer", *MODEL_FILES)

# Types that Megatron has and we do not: why.
_REFUSED = {
    "BertWordPieceLowerCase": "BERT models are not trained here",
    "BertWordPieceCase": "BERT models are not trained here",
    "MultimodalTokenizer": "only text is trained here",
    "NullMultimodalTokenizer": "only text is trained here",
    "SFTTokenizer": "only pre-training on documents is done here",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """A type and everything it may be made from.

    Attributes:
        kind: the type.
        model: the file of the types in ``MODEL_FILES``.
        vocab_file, merge_file: of GPT2BPETokenizer.
        vocab_size: the vocabulary of NullTokenizer; ids kept by TikTokenizer; of the others one that is larger than
            their own.
        eod_id, pad_id: of NullTokenizer; default ``vocab_size - 1`` and none.
        pattern, num_special, special_tokens: of TikTokenizer; ``None``: its defaults.
    """

    kind: str | None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    eod_id: int | None = None
    pad_id: int = NO_PAD
    pattern: str | None = None
    num_special: int | None = None
    special_tokens: tuple[str, ...] | None = None


def tokenizer_problems(choice: TokenizerChoice) -> list[Problem]:
    """What is wrong with a choice of tokenizer, without opening a file; empty where nothing is."""
    if choice.kind not in TOKENIZER_TYPES:
        return [_unknown(choice.kind)]
    found = [*_file_problems(choice), *_surplus_problems(choice)]
    if choice.vocab_size is not None and choice.vocab_size < 1:
        found.append(Problem(f"--vocab-size {choice.vocab_size}", "at least 1", "--vocab-size"))
    elif choice.kind == "ByteTokenizer" and (choice.vocab_size or ByteTokenizer.vocab_size) < ByteTokenizer.vocab_size:
        given = f"--vocab-size {choice.vocab_size} with {choice.kind}"
        found.append(Problem(given, f"at least {ByteTokenizer.vocab_size}", "leave out --vocab-size"))
    if choice.kind == "NullTokenizer":
        found += _null_problems(choice.vocab_size, choice.eod_id, choice.pad_id)
    if choice.kind == "TikTokenizer":
        found += _tiktoken_problems(choice)
    return found


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """The tokenizer.

    Raises:
        ConfigError: see ``tokenizer_problems``; or a file or package is missing.
        DamagedInputError: a tokenizer file is damaged.
    """
    problems = tokenizer_problems(choice)
    if problems:
        raise ConfigError(problems)
    kind, model, vocab_size = choice.kind, choice.model or "", choice.vocab_size
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(model, vocab_size)
    if kind in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(model, vocab_size, kind)
    if kind == "TikTokenizer":
        return TikTokenizer(
            model,
            vocab_size,
            pattern=choice.pattern or "v2",
            num_special=DEFAULT_NUM_SPECIAL if choice.num_special is None else choice.num_special,
            special_tokens=choice.special_tokens or SPECIAL_TOKENS,
        )
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(choice.vocab_file or "", choice.merge_file or "", vocab_size)
    if kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        return tokenizer
    assert vocab_size is not None  # refused above
    return NullTokenizer(vocab_size, choice.eod_id, choice.pad_id)


def _unknown(kind: str | None) -> Problem:
    names = ", ".join(TOKENIZER_TYPES)
    change = "--tokenizer-type to one of these"
    if kind is None:
        return Problem("no --tokenizer-type", f"one of {names}", "add --tokenizer-type")
    if kind in _REFUSED:
        return Problem(f"--tokenizer-type {kind}", f"one of {names}; {_REFUSED[kind]}", change)
    near = difflib.get_close_matches(kind, TOKENIZER_TYPES, n=1)
    return Problem(f"--tokenizer-type {kind}", f"one of {names}", f"--tokenizer-type {near[0]}" if near else change)


def _file_problems(choice: TokenizerChoice) -> Iterator[Problem]:
    """Files that the type needs and that were not given."""
    given = f"--tokenizer-type {choice.kind} without a file"
    if choice.kind in MODEL_FILES and choice.model is None:
        yield Problem(given, MODEL_FILES[choice.kind], "--tokenizer-model")
    if choice.kind == "GPT2BPETokenizer":
        if choice.vocab_file is None:
            yield Problem(given, "a vocab.json", "--vocab-file")
        if choice.merge_file is None:
            yield Problem(given, "a merges.txt", "--merge-file")


def _surplus_problems(choice: TokenizerChoice) -> Iterator[Problem]:
    """Settings that belong to another type."""
    owners = {
        "--tokenizer-model": (choice.model, tuple(MODEL_FILES)),
        "--vocab-file": (choice.vocab_file, ("GPT2BPETokenizer",)),
        "--merge-file": (choice.merge_file, ("GPT2BPETokenizer",)),
        "--tiktoken-pattern": (choice.pattern, ("TikTokenizer",)),
        "--tiktoken-num-special-tokens": (choice.num_special, ("TikTokenizer",)),
        "--tokenizer-special-tokens": (choice.special_tokens, ("TikTokenizer",)),
        "--null-tokenizer-eod-id": (choice.eod_id, ("NullTokenizer",)),
        "--null-tokenizer-pad-id": (None if choice.pad_id == NO_PAD else choice.pad_id, ("NullTokenizer",)),
    }
    for flag, (value, kinds) in owners.items():
        if value is not None and choice.kind not in kinds:
            yield Problem(
                f"{flag} with {choice.kind}", f"{' or '.join(kinds)}, whose setting it is", f"leave out {flag}"
            )


def _null_problems(vocab_size: int | None, eod_id: int | None, pad_id: int) -> Iterator[Problem]:
    if vocab_size is None:
        yield Problem("--tokenizer-type NullTokenizer without a size", "the vocabulary size", "--vocab-size")
        return
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        flag = "--null-tokenizer-eod-id"
        yield Problem(f"{flag} {eod_id}", f"an id from 0 to {vocab_size - 1}", flag)
    if not NO_PAD <= pad_id < vocab_size:
        flag = "--null-tokenizer-pad-id"
        yield Problem(f"{flag} {pad_id}", f"-1 or an id up to {vocab_size - 1}", flag)


def _tiktoken_problems(choice: TokenizerChoice) -> Iterator[Problem]:
    if choice.pattern is not None and choice.pattern not in PATTERNS:
        yield Problem(f"--tiktoken-pattern {choice.pattern}", " or ".join(PATTERNS), "--tiktoken-pattern")
    num_special = DEFAULT_NUM_SPECIAL if choice.num_special is None else choice.num_special
    yield from special_token_problems(choice.special_tokens or SPECIAL_TOKENS, num_special)
