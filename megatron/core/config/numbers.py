"""Numbers out of a user's words, as far as what counts with them holds such numbers."""

from __future__ import annotations

MOST_DIGITS = 18
WHOLE_NUMBER = f"a whole number of at most {MOST_DIGITS} digits"
MOST_RANKS = 2**20
"""More than any machine has; plans list their ranks."""
_SHOWN = 40


def whole_number(text: str) -> int | None:
    """The whole number that a text spells; ``None`` where it spells none, or one that 64 bits may not hold."""
    try:
        number = int(text)
    except ValueError:  # Also thousands of digits.
        return None
    return number if abs(number) < 10**MOST_DIGITS else None


def shortened(word: str) -> str:
    """A word for a message, which need not repeat all of it."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}... ({len(word)} characters)"
