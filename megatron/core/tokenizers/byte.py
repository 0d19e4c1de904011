"""A tokenizer without files: one token per byte of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer

_BYTES = 256


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of UTF-8, 256 is ``<eod>``, 257 is ``<pad>``. Vocabulary 258."""

    vocab_size = _BYTES + 2
    eod = _BYTES
    pad = _BYTES + 1
    special_ids = frozenset({eod})

    def tokenize(self, text: str) -> list[int]:
        """The bytes of ``text`` in UTF-8.

        Raises:
            ValueError: the text holds a lone surrogate, which UTF-8 has no bytes for.
        """
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the byte ids; a sequence of bytes that is not UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < _BYTES).decode("utf-8", errors="replace")

    def identifiers(self) -> dict[str, str]:
        """The class alone: there is nothing to set."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}
