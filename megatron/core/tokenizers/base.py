"""What the rest of the program asks of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

# Pad id of a tokenizer without a pad token: no data file may hold it.
NO_PAD = -1


class Tokenizer(ABC):
    """Text to token ids and back. Every id it makes is in ``range(vocab_size)``.

    ``eod`` is the id that ends a document. ``pad`` is the pad token's id, or -1 where there is none.
    ``special_ids`` are the ids that stand for no text, without the pad token's.
    """

    vocab_size: int
    eod: int
    pad: int
    special_ids: frozenset[int]

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``; no special token is added.

        Raises:
            ValueError: the text cannot be said in this vocabulary.
        """

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are left out."""

    @abstractmethod
    def identifiers(self) -> dict[str, str]:
        """What tells this tokenizer from another, for the names of cached sample indices."""


def loss_pad_id(tokenizer: Tokenizer, allow_ambiguous: bool) -> int:
    """The id whose positions carry no loss: ``pad``, or -1 where ``pad`` is also another special token.

    Masking an id that also ends documents would hide real tokens from training; ``allow_ambiguous`` does it anyway.
    """
    ambiguous = tokenizer.pad == tokenizer.eod or tokenizer.pad in tokenizer.special_ids
    return NO_PAD if ambiguous and not allow_ambiguous else tokenizer.pad
