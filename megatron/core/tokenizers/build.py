"""From the name of a tokenizer type to a tokenizer, or to the reasons why not."""

from __future__ import annotations

import difflib

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.tokenizers.base import NO_PAD, Tokenizer
from megatron.core.tokenizers.byte import ByteTokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.null import NullTokenizer

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")

_AS_JSON = "convert it to a tokenizer.json and use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FILE"
# Types that Megatron has and we do not: what to do instead.
_REFUSED = {
    "BertWordPieceLowerCase": "BERT models are not trained here",
    "BertWordPieceCase": "BERT models are not trained here",
    "GPT2BPETokenizer": f"vocab.json and merges.txt are read only inside a tokenizer.json; {_AS_JSON}",
    "SentencePieceTokenizer": f"SentencePiece model files are not read; {_AS_JSON}",
    "GPTSentencePieceTokenizer": f"SentencePiece model files are not read; {_AS_JSON}",
    "Llama2Tokenizer": f"SentencePiece model files are not read; {_AS_JSON}",
    "TikTokenizer": f"tiktoken files are not read; {_AS_JSON}",
    "MultimodalTokenizer": "only text is trained here",
    "NullMultimodalTokenizer": "only text is trained here",
    "SFTTokenizer": "only pre-training on documents is done here",
}


def tokenizer_problems(
    kind: str | None,
    *,
    model: str | None = None,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    pad_id: int = NO_PAD,
) -> list[Problem]:
    """What is wrong with a choice of tokenizer, without opening a file; empty where nothing is."""
    if kind not in TOKENIZER_TYPES:
        return [_unknown(kind)]
    found = []
    if vocab_size is not None and vocab_size < 1:
        found.append(Problem(f"--vocab-size {vocab_size}", "at least 1", "--vocab-size"))
    if kind == "HuggingFaceTokenizer" and model is None:
        found.append(
            Problem(f"--tokenizer-type {kind} without a file", "a tokenizer.json or its folder", "--tokenizer-model")
        )
    if kind != "HuggingFaceTokenizer" and model is not None:
        found.append(
            Problem(f"--tokenizer-model {model} with {kind}", "no file: this type needs none", "--tokenizer-model")
        )
    if kind == "ByteTokenizer" and vocab_size is not None and vocab_size < ByteTokenizer.vocab_size:
        size = ByteTokenizer.vocab_size
        found.append(Problem(f"--vocab-size {vocab_size} with {kind}", f"at least {size}", "leave out --vocab-size"))
    if kind == "NullTokenizer":
        found += _null_problems(vocab_size, eod_id, pad_id)
    elif eod_id is not None or pad_id != NO_PAD:
        found.append(
            Problem(
                f"--null-tokenizer-eod-id or --null-tokenizer-pad-id with {kind}",
                "--tokenizer-type NullTokenizer, whose ids they are",
                "leave them out",
            )
        )
    return found


def build_tokenizer(
    kind: str | None,
    *,
    model: str | None = None,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    pad_id: int = NO_PAD,
) -> Tokenizer:
    """The tokenizer of type ``kind``.

    Args:
        model: ``tokenizer.json`` or its folder, for HuggingFaceTokenizer.
        vocab_size: the vocabulary of NullTokenizer, and for the others one that is larger than their own.
        eod_id, pad_id: of NullTokenizer; default ``vocab_size - 1`` and none.

    Raises:
        ConfigError: see ``tokenizer_problems``; or a file or package is missing.
        DamagedInputError: a tokenizer file is damaged.
    """
    problems = tokenizer_problems(kind, model=model, vocab_size=vocab_size, eod_id=eod_id, pad_id=pad_id)
    if problems:
        raise ConfigError(problems)
    if model is not None:
        return HuggingFaceTokenizer(model, vocab_size)
    if kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        return tokenizer
    assert vocab_size is not None  # refused above
    return NullTokenizer(vocab_size, eod_id, pad_id)


def _unknown(kind: str | None) -> Problem:
    names = ", ".join(TOKENIZER_TYPES)
    change = f"--tokenizer-type {', '.join(TOKENIZER_TYPES[:-1])} or {TOKENIZER_TYPES[-1]}"
    if kind is None:
        return Problem("no --tokenizer-type", f"one of {names}", change)
    if kind in _REFUSED:
        return Problem(f"--tokenizer-type {kind}", f"one of {names}; {_REFUSED[kind]}", change)
    near = difflib.get_close_matches(kind, TOKENIZER_TYPES, n=1)
    return Problem(f"--tokenizer-type {kind}", f"one of {names}", f"--tokenizer-type {near[0]}" if near else change)


def _null_problems(vocab_size: int | None, eod_id: int | None, pad_id: int) -> list[Problem]:
    if vocab_size is None:
        return [Problem("--tokenizer-type NullTokenizer without a size", "the vocabulary size", "--vocab-size")]
    found = []
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        found.append(
            Problem(f"--null-tokenizer-eod-id {eod_id}", f"an id from 0 to {vocab_size - 1}", "--null-tokenizer-eod-id")
        )
    if not NO_PAD <= pad_id < vocab_size:
        found.append(
            Problem(
                f"--null-tokenizer-pad-id {pad_id}", f"-1 or an id up to {vocab_size - 1}", "--null-tokenizer-pad-id"
            )
        )
    return found
