"""What a split is made of: which sequences of which data sets, and how many samples of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.blended import blend_size, member_request
from megatron.core.datasets.gpt_indices import EXTRA_TOKENS, SamplePlan, plan_samples
from megatron.core.datasets.indexed_dataset import TokenSource
from megatron.core.datasets.splits import Bookends, normalize, sequence_range


@dataclass(frozen=True, kw_only=True)
class MemberPlan:
    """One data set's part in a split: sequences ``first`` up to ``stop``, and the samples made of them.

    ``request`` is the number of samples asked for; ``None`` asks for one epoch.
    """

    source: TokenSource
    first: int
    stop: int
    request: int | None
    samples: SamplePlan


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A split with data. ``weights`` is ``None`` where one data set is used as it is; then there is one member.

    ``size`` is the number of samples drawn from a blend; ``None`` draws every sample of every member once, and
    ``weights`` are the members' numbers of samples.
    """

    members: tuple[MemberPlan, ...]
    weights: tuple[float, ...] | None
    size: int | None


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A split without data, and why. ``chosen``: the user left it out; otherwise it came out empty."""

    reason: str
    chosen: bool


def plan_split(
    sources: Sequence[TokenSource],
    weights: Sequence[float] | None,
    *,
    bookends: Bookends,
    size: int | None,
    sequence_length: int,
    surplus: float,
) -> SplitPlan | Absent:
    """Plan one split of a blend of ``sources``, or of one of them where it stands alone without weights.

    Args:
        weights: one for each source, or ``None``: in proportion to the samples of each.
        bookends: the part of each source that the split covers.
        size: samples asked for; ``None`` for one epoch, 0 for none.
        surplus: share on top of the request to each member of a weighted blend.
    """
    if size == 0:
        return Absent(reason="no samples were asked for", chosen=True)
    if weights is not None:
        return _plan_weighted(sources, weights, bookends, size, sequence_length=sequence_length, surplus=surplus)
    if len(sources) == 1:
        member = _plan_member(sources[0], bookends, size, sequence_length)
        return member if isinstance(member, Absent) else SplitPlan(members=(member,), weights=None, size=None)
    planned = [_plan_member(source, bookends, None, sequence_length) for source in sources]
    members = tuple(member for member in planned if isinstance(member, MemberPlan))
    if not members:
        return Absent(reason="; ".join(p.reason for p in planned if isinstance(p, Absent)), chosen=False)
    counts = tuple(member.samples.num_samples for member in members)
    if size is None:
        return SplitPlan(members=members, weights=counts, size=None)
    return SplitPlan(members=members, weights=tuple(normalize(counts)), size=min(size, sum(counts)))


def _plan_weighted(
    sources: Sequence[TokenSource],
    weights: Sequence[float],
    bookends: Bookends,
    size: int | None,
    *,
    sequence_length: int,
    surplus: float,
) -> SplitPlan | Absent:
    if size is None:
        return Absent(reason="a blend with weights needs a number of samples", chosen=False)
    shares = normalize(weights)
    planned = [
        _plan_member(source, bookends, member_request(size, share, surplus), sequence_length)
        for source, share in zip(sources, shares, strict=True)
    ]
    empty = [plan.reason for plan in planned if isinstance(plan, Absent)]
    if empty:
        return Absent(reason="; ".join(empty), chosen=False)
    members = tuple(member for member in planned if isinstance(member, MemberPlan))
    return SplitPlan(members=members, weights=tuple(normalize(shares)), size=blend_size(size, shares))


def _plan_member(
    source: TokenSource, bookends: Bookends, request: int | None, sequence_length: int
) -> MemberPlan | Absent:
    total = len(source.sequence_lengths)
    first, stop = sequence_range(bookends, total)
    tokens = int(np.sum(source.sequence_lengths[first:stop], dtype=np.int64))
    low, high = bookends
    where = f"{source.name}: its share {low:.4g}..{high:.4g} of {total} sequences is sequences {first}..{stop}"
    if tokens == 0:
        return Absent(reason=f"{where}, which hold no tokens", chosen=False)
    samples = plan_samples(tokens, sequence_length, request)
    if samples.num_samples == 0:
        needed = sequence_length + EXTRA_TOKENS
        return Absent(reason=f"{where}, which hold {tokens} tokens; one sample needs {needed}", chosen=False)
    return MemberPlan(source=source, first=first, stop=stop, request=request, samples=samples)
