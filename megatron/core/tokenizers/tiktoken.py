"""Vocabularies in Megatron's tiktoken JSON, through the ``tiktoken`` library."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.files import parse_json, read_utf8, require_file, require_package

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How text is cut before merging, by the names that Megatron gives the two ways; part of the format."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""The first special tokens; ``<SPECIAL_7>`` and so on follow."""

DEFAULT_VOCAB_SIZE = 131072
DEFAULT_NUM_SPECIAL = 1000


class TikTokenizer(Tokenizer):
    """A JSON list of ``{"rank", "token_bytes" (base64), "token_str"}``, ranks 0, 1, ... and the 256 bytes first.

    Ids are the special tokens, then the first ``vocab_size - num_special`` entries of the file. ``</s>`` ends
    documents. A special token that is spelt out in a text becomes its id, as in Megatron.

    Args:
        model: the file.
        vocab_size: ids in all; default 131,072.
        pattern: ``v1`` or ``v2``, how text is cut.
        num_special: ids of special tokens.
        special_tokens: their names from 0 on, ``SPECIAL_TOKENS`` among them; the rest is filled up.

    Raises:
        ConfigError: library or file is missing, or the numbers do not fit the file.
        DamagedInputError: the file is not of this form.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int | None = None,
        *,
        pattern: str = "v2",
        num_special: int = DEFAULT_NUM_SPECIAL,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ) -> None:
        path = require_file(model, "--tokenizer-model", "a tiktoken vocabulary in JSON")
        require_package("tiktoken", "TikTokenizer")
        text = read_utf8(path)
        self.vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        merges = _merges(path, text)
        special = (*special_tokens, *(f"<SPECIAL_{i}>" for i in range(len(special_tokens), num_special)))
        problems = _size_problems(self.vocab_size, special_tokens, num_special, len(merges), path)
        if problems:
            raise ConfigError(problems)
        ids = {token: i for i, token in enumerate(special)}
        self.eod, self.pad = ids["</s>"], ids["<pad>"]
        self.special_ids = frozenset(ids.values()) - {self.pad}
        ranks = {token: num_special + i for i, token in enumerate(merges[: self.vocab_size - num_special])}
        self._encoding = _encoding(path.stem, PATTERNS[pattern], ranks, ids)
        self._identifiers = {
            "tokenizer_path": str(path),
            "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
            "pattern": pattern,
            "special_tokens": json.dumps(special_tokens),
            "num_special_tokens": str(num_special),
            "vocab_size": str(self.vocab_size),
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``.

        Raises:
            ValueError: the text holds a lone surrogate, which the library would replace.
        """
        text.encode("utf-8")
        return self._encoding.encode(text, allowed_special="all")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        special = self.special_ids | {self.pad}
        return self._encoding.decode([i for i in ids if i not in special])

    def identifiers(self) -> dict[str, str]:
        """Class, path and SHA-256 of the file, and every setting."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}", **self._identifiers}


def special_token_problems(special_tokens: Sequence[str], num_special: int) -> list[Problem]:
    """What is wrong with names for special tokens, without a file."""
    flag = "--tokenizer-special-tokens"
    given = f"{flag} {' '.join(special_tokens)}"
    if len(set(special_tokens)) != len(special_tokens) or not set(SPECIAL_TOKENS) <= set(special_tokens):
        return [Problem(given, f"each name once, {' '.join(SPECIAL_TOKENS)} among them", flag)]
    if len(special_tokens) > num_special:
        flag = "--tiktoken-num-special-tokens"
        return [Problem(f"{flag} {num_special}", f"at least the {len(special_tokens)} that have names", flag)]
    return []


def _size_problems(
    vocab_size: int, special_tokens: Sequence[str], num_special: int, in_file: int, path: Path
) -> list[Problem]:
    found = special_token_problems(special_tokens, num_special)
    if vocab_size < num_special + 256:
        needed = f"at least {num_special} special tokens and 256 bytes"
        found.append(Problem(f"--vocab-size {vocab_size}", needed, "--vocab-size or --tiktoken-num-special-tokens"))
    if vocab_size - num_special > in_file:
        found.append(
            Problem(
                f"a vocabulary of {vocab_size} (--vocab-size; default {DEFAULT_VOCAB_SIZE}) with {num_special} special "
                f"tokens",
                f"at most {in_file + num_special}: {path} has {in_file} tokens",
                f"--vocab-size {in_file + num_special}",
            )
        )
    return found


def _merges(path: Path, text: str) -> list[bytes]:
    """The file's tokens in order of rank."""
    entries = parse_json(path, text)
    if not isinstance(entries, list):
        raise DamagedInputError(f"{path}: needs a list of tokens; is it another kind of file?")
    merges = []
    for place, entry in enumerate(entries):
        try:
            rank, token = entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            raise DamagedInputError(f"{path}: entry {place} needs a rank and token_bytes in base64") from error
        if rank != place or (place < 256 and token != bytes([place])):
            raise DamagedInputError(f"{path}: entry {place} has rank {rank} and token {token!r}, out of order")
        merges.append(token)
    if len(set(merges)) != len(merges):
        raise DamagedInputError(f"{path}: a token is there twice")
    return merges


def _encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    from tiktoken import Encoding

    return Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
