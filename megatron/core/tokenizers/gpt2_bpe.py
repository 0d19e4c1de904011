"""GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``, through the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.tokenizers.base import NO_PAD, Tokenizer
from megatron.core.tokenizers.files import parse_json, read_utf8, require_file, require_package, vocabulary_size

END = "<|endoftext|>"


class GPT2BPETokenizer(Tokenizer):
    """Documents end in ``<|endoftext|>``; there is no pad token.

    Args:
        vocab_file: tokens to ids, JSON.
        merge_file: one merge a line, the likeliest first.
        vocab_size: a larger vocabulary than the files' own, or ``None``.

    Raises:
        ConfigError: the library or a file is missing, or ``vocab_size`` is too small.
        DamagedInputError: a file is not of its kind, or they are of different tokenizers.
    """

    def __init__(self, vocab_file: str, merge_file: str, vocab_size: int | None = None) -> None:
        vocabulary = require_file(vocab_file, "--vocab-file", "a vocab.json")
        merges = require_file(merge_file, "--merge-file", "a merges.txt")
        require_package("tokenizers", "GPT2BPETokenizer")
        texts = read_utf8(vocabulary), read_utf8(merges)
        ids = _ids(vocabulary, texts[0])
        self._tokenizer = _build(ids, _pairs(merges, texts[1]), merges)
        self._paths = (str(vocabulary), str(merges))
        self._sha256 = hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()
        self.eod, self.pad = ids[END], NO_PAD
        self.special_ids = frozenset({self.eod})
        self.vocab_size = vocabulary_size(max(ids.values()) + 1, vocab_size, vocabulary)

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; ``<|endoftext|>`` spelt out in it becomes its id."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, the end of documents left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def identifiers(self) -> dict[str, str]:
        """Class, paths, and SHA-256 of both files together."""
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "vocab_file": self._paths[0],
            "merge_file": self._paths[1],
            "sha256": self._sha256,
        }


def _ids(path: Path, text: str) -> dict[str, int]:
    ids = parse_json(path, text)
    if not isinstance(ids, dict) or not all(isinstance(i, int) for i in ids.values()):
        raise DamagedInputError(f"{path}: needs an object of tokens and ids")
    if END not in ids:
        needed = f"a vocabulary with {END}, which ends documents"
        raise ConfigError([Problem(f"--vocab-file {path}", needed, "--vocab-file")])
    return ids


def _pairs(path: Path, text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.rstrip("\r").partition(" ")
        if not space or " " in right:
            raise DamagedInputError(f"{path}: line {number} is not two tokens")
        pairs.append((left, right))
    return pairs


def _build(ids: dict[str, int], pairs: list[tuple[str, str]], merges: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    unknown = next((a + b for a, b in pairs if not {a, b, a + b} <= ids.keys()), None)
    if unknown is not None:
        raise DamagedInputError(f"{merges}: makes {unknown!r}, which the vocabulary does not have with its parts")
    made = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made
