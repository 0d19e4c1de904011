"""Median, interval and verdict of paired measurements."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron.determinism.report import Exit
from megatron.determinism.tax_statistics import Estimate, estimate, judge, order_bounds, round_order


def test_tax_is_the_median_of_paired_ratios():
    found = estimate([1.1, 2.4, 3.0], [1.0, 2.0, 3.0])
    assert found.tax == pytest.approx(0.1)
    assert estimate([1.0, 1.2], [1.0, 1.0]).tax == pytest.approx(0.1)


@pytest.mark.parametrize("pairs", range(6, 13))
def test_interval_of_order_statistics_is_exact(pairs: int):
    """Over all equally likely patterns of ratios below and above the median, at least 95% of intervals hold it, and
    an interval one narrower at both ends would not."""
    skipped, coverage = order_bounds(pairs)

    def share(outside: int) -> float:
        below = [sum(pattern) for pattern in itertools.product((0, 1), repeat=pairs)]
        return sum(outside < count < pairs - outside for count in below) / 2**pairs

    assert coverage == pytest.approx(share(skipped))
    assert share(skipped) >= 0.95 > share(skipped + 1)


def test_six_pairs_give_their_extremes():
    found = estimate([1.06, 1.01, 1.02, 1.05, 1.03, 1.04], [1.0] * 6)
    assert found.interval == pytest.approx((0.01, 0.06))
    assert found.confidence == pytest.approx(1 - 2 / 64)
    assert "order statistics 1 and 6 of 6" in found.method


def test_few_pairs_have_students_interval():
    ratios = [1.0, 1.1, 1.21]
    found = estimate(ratios, [1.0] * 3)
    reach = 4.303 * math.log(1.1) / math.sqrt(3)
    assert found.interval == pytest.approx((1.1 * math.exp(-reach) - 1, 1.1 * math.exp(reach) - 1))
    assert found.confidence == 0.95


def test_one_pair_has_no_interval():
    assert estimate([1.2], [1.0]).interval is None


@pytest.mark.parametrize(
    ("interval", "limit", "expected"),
    [
        ((0.0, 0.008), None, (Exit.SAME, "report")),
        ((0.0, 0.008), 0.01, (Exit.SAME, "within")),
        ((-0.004, 0.002), 0.01, (Exit.SAME, "within")),
        ((0.005, 0.012), 0.01, (Exit.DIFFERENT, "over")),
        ((0.2, 0.5), 0.01, (Exit.DIFFERENT, "over")),
        ((-0.02, 0.03), 0.01, (Exit.DIFFERENT, "inconclusive")),
        ((-0.02, 0.005), 0.01, (Exit.DIFFERENT, "inconclusive")),
        (None, 0.01, (Exit.DIFFERENT, "inconclusive")),
        (None, None, (Exit.SAME, "report")),
    ],
)
def test_verdict(interval: tuple[float, float] | None, limit: float | None, expected: tuple[Exit, str]):
    assert judge(Estimate(tax=0.0, interval=interval, confidence=None, method=""), limit)[:2] == expected


def test_legs_go_forward_and_back():
    assert [leg for number in range(3) for leg in round_order("AB", number)] == list("ABBAAB")
    assert [leg for number in range(2) for leg in round_order("ABC", number)] == list("ABCCBA")
