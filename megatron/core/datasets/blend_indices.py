"""Which sample of a blend comes from which member: the greedy rule one draw at a time, many draws at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

BLEND_NAMES = ("dataset_index", "dataset_sample_index")

_WORTH_A_WORD = 1 << 28
"""Draws from which on their making is announced, and then every tenth of them: it takes about a minute a billion."""
_SLOW_SHARE = 1 / 512
"""A member with a smaller share, and less than a quarter of a mean one, takes too long to catch up from one draw too
many: it is never guessed to have one."""
_COUNT_BLOCK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class LaneSizes:
    """How the draws are cut up; it decides the time alone. ``lanes`` runs of ``steps`` draws each are made at once,
    fewer where a step over all members would be more than ``cells`` numbers. ``first_lanes`` and ``warm_up`` (draws
    before a lane's own) are where the adaptation starts."""

    lanes: int = 2048
    first_lanes: int = 256
    least_lanes: int = 16
    steps: int = 4104
    warm_up: int = 256
    cells: int = 1 << 17


def build_blend_indices(weights: Sequence[float], size: int, sizes: LaneSizes | None = None) -> dict[str, NDArray]:
    """``dataset_index`` int16 and ``dataset_sample_index`` int64, both [size]; ``weights`` add up to 1.

    Draw i goes to the member with the largest ``weight * max(i, 1) - drawn so far``, in float64, the first of equals.
    """
    return _draw(np.array(weights, np.float64), None, size, sizes or LaneSizes())


def build_exhaustive_indices(counts: Sequence[int], sizes: LaneSizes | None = None) -> dict[str, NDArray]:
    """As ``build_blend_indices`` with the members' numbers of samples for weights, drawing each sample exactly once."""
    limits = np.array(counts, np.float64)
    total = sum(counts)
    return _draw(limits / np.float64(total), limits, total, sizes or LaneSizes())


def draws_by_member(dataset_index: NDArray[np.int16], num_members: int) -> NDArray[np.int64]:
    """[num_members]: how often each occurs; a block at a time, as NumPy would widen all of it at once."""
    found = np.zeros(num_members, np.int64)
    for start in range(0, len(dataset_index), _COUNT_BLOCK):
        found += np.bincount(dataset_index[start : start + _COUNT_BLOCK], minlength=num_members)
    return found


def _draw(shares: NDArray, limits: NDArray | None, size: int, sizes: LaneSizes) -> dict[str, NDArray]:
    """The draws in blocks of lanes: runs of consecutive draws, each made by the rule itself, all lanes side by side.

    A lane needs the members' counts at its first draw. The first lane has them; for the others they are guessed a
    little earlier and drawn on from there, because a greedy choice forgets: the sequences from different counts soon
    agree (Adler et al., "Convex dynamics with constant input", 2010). Then a lane is kept only if the counts it began
    with are those that the kept lane before it ended with, so every draw kept was made from the counts that one draw
    after the other would have come to. The next block starts behind the last kept lane; the first always is.
    """
    members, counters = np.zeros(size, np.int16), np.zeros(size, np.int64)
    if len(shares) == 1:
        counters[:] = np.arange(size)
        return dict(zip(BLEND_NAMES, (members, counters), strict=True))
    drawn = np.zeros((1, len(shares)))
    position, lanes, warm_up = 0, sizes.first_lanes, sizes.warm_up
    most_lanes = max(1, min(sizes.lanes, sizes.cells // len(shares)))
    while position < size:
        # Draw 0 stands alone: it and draw 1 are both made as if one draw were due.
        steps = min(sizes.steps, size - position) if position else 1
        count = max(1, min(lanes, most_lanes, (size - position) // steps)) if position else 1
        firsts = position + steps * np.arange(count)
        begins = drawn
        if count > 1:
            begins = np.concatenate((drawn, _guesses(shares, limits, firsts[1:] - warm_up, drawn, warm_up)))
        block = slice(position, position + steps * count)
        ends = begins.copy()
        out = (members[block].reshape(count, steps), counters[block].reshape(count, steps))
        _run(shares, limits, np.maximum(firsts, 1), ends, steps, out)
        wrong = (ends[:-1] != begins[1:]).any(axis=1)
        kept = int(wrong.argmax()) + 1 if wrong.any() else count
        _report(position, position + kept * steps, size, len(shares))
        position, drawn = position + kept * steps, ends[kept - 1 : kept].copy()
        if kept < count:
            lanes, warm_up = max(2 * kept, sizes.least_lanes), min(2 * warm_up, sizes.steps // 2)
        elif count == lanes:
            lanes = 2 * lanes
    return dict(zip(BLEND_NAMES, (members, counters), strict=True))


def _run(
    shares: NDArray,
    limits: NDArray | None,
    due: NDArray,
    drawn: NDArray,
    steps: int,
    out: tuple[NDArray, NDArray] | None = None,
) -> None:
    """Make ``steps`` draws in each lane, in place.

    Args:
        due: [lanes] what the shares are multiplied by at the first draw; one more at each that follows.
        drawn: [lanes, members] float64, contiguous; counts before, and then behind, the draws.
        out: two [lanes, steps]: the member drawn, and how often it had been drawn before.
    """
    lanes, num_members = drawn.shape
    # Whole arrays: a product that spreads one factor over short rows takes several times as long.
    factor = np.repeat(due.astype(np.float64), num_members).reshape(drawn.shape)
    share = np.tile(shares, (lanes, 1))
    owed, before = np.empty_like(drawn), np.empty(lanes)
    flat, rows, chosen = drawn.reshape(-1), np.arange(lanes) * num_members, np.empty(lanes, np.intp)
    for step in range(steps):
        np.multiply(share, factor, out=owed)
        np.subtract(owed, drawn, out=owed)
        if limits is not None:
            owed[drawn >= limits] = -np.inf
        owed.argmax(axis=1, out=chosen)
        if out is not None:
            out[0][:, step] = chosen
        np.add(chosen, rows, out=chosen)
        flat.take(chosen, out=before, mode="clip")
        if out is not None:
            out[1][:, step] = before
        np.add(before, 1, out=before)
        flat[chosen] = before
        np.add(factor, 1, out=factor)


def _guesses(
    shares: NDArray, limits: NDArray | None, positions: NDArray, drawn: NDArray, warm_up: int
) -> NDArray[np.float64]:
    """[lanes, members]: counts ``warm_up`` draws behind ``positions``, likely right; ``drawn`` came before them all.

    The draws due are rounded so that they add up: down, and up where most was cut off. What is left goes to the largest
    share, which is the first to lose it again.
    """
    slow = shares < min(_SLOW_SHARE, 0.25 / len(shares))
    due = shares * positions[:, None]
    found = np.where(slow, np.maximum(np.floor(due), drawn), np.floor(due))
    left = positions - found.sum(axis=1)
    cut = np.where(slow, -1.0, due - found)
    rank = np.argsort(np.argsort(-cut, axis=1, kind="stable"), axis=1)
    found += (rank < left[:, None]) & ~slow
    found[:, shares.argmax()] += positions - found.sum(axis=1)
    _run(shares, limits, positions, found, warm_up)
    return found


def _report(before: int, now: int, size: int, num_members: int) -> None:
    if size >= _WORTH_A_WORD and (before == 0 or before * 10 // size < now * 10 // size):
        logger.warning("blend of %d data sets: %d of %d samples assigned", num_members, now, size)
