"""SentencePiece models, through the ``sentencepiece`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.files import require_file, require_package, vocabulary_size


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file. Documents end in its ``</s>``; no ``<s>`` is put before a text, as in Megatron.

    What the model's own normaliser does to a text (extra spaces, compatibility forms) is done here too.

    Args:
        model: the file.
        vocab_size: a larger vocabulary than the model's own, or ``None``.
        kind: the type that was asked for, for messages.

    Raises:
        ConfigError: library or file is missing, the model has no ``</s>``, or ``vocab_size`` is too small.
        DamagedInputError: the file is no SentencePiece model.
    """

    def __init__(self, model: str, vocab_size: int | None = None, kind: str = "SentencePieceTokenizer") -> None:
        path = require_file(model, "--tokenizer-model", "a SentencePiece .model file")
        require_package("sentencepiece", kind)
        content = path.read_bytes()
        self._model = _load(path, content)
        self._path, self._sha256 = str(path), hashlib.sha256(content).hexdigest()
        if self._model.eos_id() < 0:
            needed = "a model with an end-of-sentence piece, which ends documents"
            raise ConfigError([Problem(f"--tokenizer-model {model}", needed, "train the model with eos_id >= 0")])
        self.eod, self.pad = self._model.eos_id(), self._model.pad_id()
        own_size = self._model.get_piece_size()
        self.special_ids = frozenset(i for i in range(own_size) if self._model.is_control(i)) - {self.pad}
        self.vocab_size = vocabulary_size(own_size, vocab_size, path)

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``, without begin and end pieces."""
        return self._model.encode(text, out_type=int)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; control pieces are left out."""
        return self._model.decode(list(ids))

    def identifiers(self) -> dict[str, str]:
        """Class, path and SHA-256 of the file."""
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "tokenizer_path": self._path,
            "sha256": self._sha256,
        }


def _load(path: Path, content: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise DamagedInputError(f"{path}: not a SentencePiece model: {error}") from error
    return processor
