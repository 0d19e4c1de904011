"""A tokenizer for data that are numbers already."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import NO_PAD, Tokenizer


class NullTokenizer(Tokenizer):
    """Text is decimal ids separated by white space. The default end-of-document id is ``vocab_size - 1``."""

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = NO_PAD) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod_id is None else eod_id
        self.pad = pad_id
        self.special_ids = frozenset({self.eod})

    def tokenize(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            ValueError: something is not a number, or a number is outside the vocabulary.
        """
        ids = [int(word) for word in text.split()]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids in decimal, separated by spaces, without end-of-document and pad ids."""
        return " ".join(str(i) for i in ids if i not in (self.eod, self.pad))

    def identifiers(self) -> dict[str, str]:
        """Class and the three numbers it was made from."""
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "vocab_size": str(self.vocab_size),
            "eod_id": str(self.eod),
            "pad_id": str(self.pad),
        }
