"""Tokenizers in Hugging Face's JSON form, through the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.tokenizers.base import NO_PAD, Tokenizer
from megatron.core.tokenizers.files import parse_json, read_utf8, require_file, require_package, vocabulary_size

# Names under which published tokenizers end a document, asked for only where no tokenizer_config.json says it.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end|>", "[EOS]")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, with ``eos_token`` and ``pad_token`` from the ``tokenizer_config.json`` beside it.

    Without that file the end-of-document token is the one special token of a usual name (``<|endoftext|>``, ``</s>``,
    ...) and the pad token is ``<pad>`` or ``[PAD]``, if there is one. The vocabulary is counted up to the highest id.

    Args:
        model: the file, or a folder that holds one.
        vocab_size: a larger vocabulary than the tokenizer's own, or ``None``.

    Raises:
        ConfigError: the library or the file is missing, no end-of-document token can be told, or ``vocab_size`` is
            smaller than the tokenizer's.
        DamagedInputError: a file is not what its name says.
    """

    def __init__(self, model: str, vocab_size: int | None = None) -> None:
        path = _tokenizer_file(model)
        text = read_utf8(path)
        _checked_json(path, text, "model")
        self._tokenizer = _load(path, text)
        self._path = str(path)
        self._sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
        special = self._special_tokens()
        settings = _settings(path)
        self.eod = self._end_of_document(special, settings)
        self.pad = self._pad(special, settings)
        self.special_ids = frozenset(special.values()) - {self.pad}
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = vocabulary_size(max(ids, default=-1) + 1, vocab_size, path)

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``, without the tokens that the file's post-processor would put around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` by the file's decoder, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def identifiers(self) -> dict[str, str]:
        """Class, path and SHA-256 of the file."""
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "tokenizer_path": self._path,
            "sha256": self._sha256,
        }

    def _special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(added.items()) if token.special}

    def _id_of(self, token: str, key: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DamagedInputError(
                f"{Path(self._path).parent / 'tokenizer_config.json'}: {key} is {token!r}, which {self._path} "
                "does not know: the two files are of different tokenizers"
            )
        return found

    def _end_of_document(self, special: dict[str, int], settings: dict[str, Any]) -> int:
        token = _token_named(settings, "eos_token")
        if token is not None:
            return self._id_of(token, "eos_token")
        usual = [name for name in _USUAL_ENDS if name in special]
        if len(usual) != 1:
            raise ConfigError(
                [
                    Problem(
                        f"--tokenizer-model {self._path}",
                        f"a token that ends a document; {len(usual)} of its special tokens have a usual name: {usual}",
                        'put a tokenizer_config.json with "eos_token" beside the file',
                    )
                ]
            )
        return special[usual[0]]

    def _pad(self, special: dict[str, int], settings: dict[str, Any]) -> int:
        token = _token_named(settings, "pad_token")
        if token is not None:
            return self._id_of(token, "pad_token")
        return next((special[name] for name in ("<pad>", "[PAD]") if name in special), NO_PAD)


class _DamageNamed:
    """Turns the library's error about a file into ours.

    The library raises the bare class ``Exception`` for everything it finds wrong in a file; its subclasses (memory,
    interrupts, mistakes of ours) pass.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise DamagedInputError(f"{self._path}: not a tokenizer that can be loaded: {error}") from error


def _load(path: Path, text: str) -> Any:
    require_package("tokenizers", "HuggingFaceTokenizer")
    from tokenizers import Tokenizer as LibraryTokenizer

    with _DamageNamed(path):
        return LibraryTokenizer.from_str(text)


def _tokenizer_file(model: str) -> Path:
    path = Path(model, "tokenizer.json") if Path(model).is_dir() else Path(model)
    return require_file(str(path), "--tokenizer-model", "a tokenizer.json or a folder that holds one")


def _checked_json(path: Path, text: str, key: str | None) -> dict[str, Any]:
    content = parse_json(path, text)
    if not isinstance(content, dict) or (key is not None and key not in content):
        needed = "an object" if key is None else f'an object with the key "{key}"'
        raise DamagedInputError(f"{path}: needs {needed}; is it another kind of file?")
    return content


def _settings(path: Path) -> dict[str, Any]:
    beside = path.with_name("tokenizer_config.json")
    return _checked_json(beside, read_utf8(beside), None) if beside.is_file() else {}


def _token_named(settings: dict[str, Any], key: str) -> str | None:
    """The token's text; it is written as a string or as an object with "content"."""
    value = settings.get(key)
    return value.get("content") if isinstance(value, dict) else value
