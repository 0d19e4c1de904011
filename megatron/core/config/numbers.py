"""Numbers out of a user's words, as far as what counts with them holds such numbers."""

from __future__ import annotations

import math

MOST_DIGITS = 18
WHOLE_NUMBER = f"a whole number of at most {MOST_DIGITS} digits"
REAL_NUMBER = "a finite number that fp32 holds"
MOST_RANKS = 2**20
"""More than any machine has; plans list their ranks."""
_FP32_LEAST, _FP32_MOST = 2.0**-126, 2.0**128 - 2.0**104
_SHOWN = 40


def whole_number(text: str) -> int | None:
    """The whole number that a text spells; ``None`` where it spells none, or one that 64 bits may not hold."""
    try:
        number = int(text)
    except ValueError:  # Also thousands of digits.
        return None
    return number if abs(number) < 10**MOST_DIGITS else None


def real_number(text: str) -> float | None:
    """The number that a text spells; ``None`` where it spells none, or one that fp32 has as infinite or, though it is
    not 0, as 0 or with fewer digits than other numbers."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number == 0 or _FP32_LEAST <= math.fabs(number) <= _FP32_MOST else None


def shortened(word: str) -> str:
    """A word for a message, which need not repeat all of it."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}... ({len(word)} characters)"
