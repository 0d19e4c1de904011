"""What paired measurements say: the median of the ratios, an interval for it, and the verdict against a limit.

The interval is exact where there are at least six pairs: the order statistics of the ratios, whatever their
distribution. With two to five it is Student's, of the ratios' logarithms, and wide. One pair has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.determinism.report import Exit

CONFIDENCE = 0.95
LEAST_FOR_ORDER = 6
"""The smallest number of pairs whose extremes hold the median with 95%."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Two-sided 95% quantiles of Student's distribution, by degrees of freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Median of paired ratios less one, and its interval; ``None`` where one pair allows none."""

    tax: float
    interval: tuple[float, float] | None
    confidence: float | None
    method: str

    @property
    def text(self) -> str:
        """The estimate in words."""
        if self.interval is None:
            return f"{self.tax:+.2%} (one pair: no interval)"
        low, high = self.interval
        return f"{self.tax:+.2%} (95% interval {low:+.2%} to {high:+.2%})"


def estimate(measured: Sequence[float], reference: Sequence[float]) -> Estimate:
    """How much longer ``measured`` takes than ``reference``; the two are paired, in seconds."""
    ratios = sorted(m / r for m, r in zip(measured, reference, strict=True))
    pairs, tax = len(ratios), statistics.median(ratios) - 1
    if pairs == 1:
        return Estimate(tax=tax, interval=None, confidence=None, method="one pair: no interval")
    if pairs < LEAST_FOR_ORDER:
        logs = [math.log(ratio) for ratio in ratios]
        middle = statistics.mean(logs)
        reach = STUDENT[pairs - 1] * statistics.stdev(logs) / math.sqrt(pairs)
        ends = math.exp(middle - reach) - 1, math.exp(middle + reach) - 1
        method = f"Student's interval of the logarithms of {pairs} paired ratios; exact from {LEAST_FOR_ORDER} pairs on"
        return Estimate(tax=tax, interval=ends, confidence=CONFIDENCE, method=method)
    skipped, coverage = order_bounds(pairs)
    ends = ratios[skipped] - 1, ratios[-1 - skipped] - 1
    method = f"order statistics {skipped + 1} and {pairs - skipped} of {pairs} paired ratios, coverage {coverage:.1%}"
    return Estimate(tax=tax, interval=ends, confidence=coverage, method=method)


def order_bounds(pairs: int) -> tuple[int, float]:
    """How many ratios lie outside the interval at either end, and the probability that it holds the median:
    1 - 2 P(Binomial(pairs, 1/2) <= outside)."""
    tail, outside = 0.0, -1
    while True:
        longer = tail + math.comb(pairs, outside + 1) / 2**pairs
        if 2 * longer > 1 - CONFIDENCE:
            return outside, 1 - 2 * tail
        tail, outside = longer, outside + 1


def judge(found: Estimate, limit: float | None) -> tuple[Exit, str, str]:
    """Exit code, verdict in one word and in a sentence."""
    if limit is None:
        return Exit.SAME, "report", ""
    if found.interval is None:
        return Exit.DIFFERENT, "inconclusive", f"; inconclusive for --max-tax {limit:.2%}: run more pairs"
    low, high = found.interval
    if low <= limit < high - low:
        return Exit.DIFFERENT, "inconclusive", f"; inconclusive: the interval is wider than --max-tax {limit:.2%}"
    if high > limit:
        return Exit.DIFFERENT, "over", f"; the interval's upper end is over --max-tax {limit:.2%}"
    return Exit.SAME, "within", f"; within --max-tax {limit:.2%}"


def round_order(legs: Sequence[str], number: int) -> list[str]:
    """The legs of round ``number`` (from 0): forward and backward in turn, so that a drift cancels."""
    return list(legs) if number % 2 == 0 else list(reversed(legs))
