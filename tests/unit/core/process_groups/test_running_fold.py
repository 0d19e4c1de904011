"""A fold in parts has the bits of the fold at once, however its members are cut, and keeps at most two tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups.running_fold import RunningFold


def _slots(members: int) -> torch.Tensor:
    """Signed zeros, denormals and sums that cancel."""
    generator = torch.Generator().manual_seed(members)
    slots = torch.randn(members, 4096, generator=generator)
    slots *= 10.0 ** torch.randint(-30, 30, slots.shape, generator=generator)
    slots[torch.rand(slots.shape, generator=generator) < 0.3] = -0.0
    slots[:, :64] = -0.0
    slots[:, 64:128] = torch.randn(members, 64, generator=generator) * 1e-41
    return slots


def _folded(slots: torch.Tensor, block: int, part: int) -> tuple[torch.Tensor, int]:
    running, kept = RunningFold(len(slots), block, blocked_fold), 0
    for start in range(0, len(slots), part):
        running.add(slots[start : start + part])
        kept = max(kept, running.kept)
    return running.result(), kept


@pytest.mark.parametrize(("members", "block"), list(itertools.product((4, 6, 8, 12), (1, 2, 3, 4, 8))))
def test_any_division_gives_the_bits_of_the_whole(members: int, block: int) -> None:
    slots = _slots(members)
    want = blocked_fold(slots, block)
    assert same_bits(want[:64], torch.full((64,), -0.0))
    for part in (n for n in range(1, members + 1) if members % n == 0):
        got, kept = _folded(slots, block, part)
        assert same_bits(got, want), part
        assert kept <= 2


@pytest.mark.parametrize(("members", "block", "count"), [(8, 2, 2), (6, 4, 2), (2, 8, 2), (3, 2, 2), (6, 6, 2)])
def test_whole_blocks_may_come_added(members: int, block: int, count: int) -> None:
    slots, whole = _slots(members), []
    running = RunningFold(members, block, blocked_fold)
    for start in range(0, members, count):
        part = slots[start : start + count]
        whole.append(running.closes(len(part)))
        if whole[-1]:
            running.add_block(blocked_fold(part, len(part)), len(part))
        else:
            running.add(part)
    assert same_bits(running.result(), blocked_fold(slots, block))
    expected = {(8, 2): [True] * 4, (6, 4): [False, False, True], (2, 8): [True], (3, 2): [True, True]}
    assert whole == expected.get((members, block), [False] * 3)


def test_a_sum_that_is_no_block_is_an_error() -> None:
    running = RunningFold(6, 4, blocked_fold)
    with pytest.raises(ValueError, match="2 members after 0 are no block of 4"):
        running.add_block(_slots(1)[0], 2)


def test_a_fold_that_restarts_its_block_with_each_part_gives_other_bits() -> None:
    """The control: what a sum would be if a pass did not go on where the one before stopped."""
    slots = _slots(8)
    parts = torch.stack([blocked_fold(slots[start : start + 2], 4) for start in range(0, 8, 2)])
    assert not same_bits(blocked_fold(parts, 4), blocked_fold(slots, 4))


def test_a_first_term_added_to_zero_gives_other_bits() -> None:
    slots = _slots(4)
    assert not same_bits(blocked_fold(torch.cat([torch.zeros(1, 4096), slots]), 5), blocked_fold(slots, 4))


def test_too_many_or_too_few_members_are_errors() -> None:
    running = RunningFold(4, 2, blocked_fold)
    running.add(_slots(3))
    with pytest.raises(ValueError, match="3 of 4 members have arrived"):
        running.result()
    with pytest.raises(ValueError, match="2 members after 3 of 4"):
        running.add(_slots(2))
