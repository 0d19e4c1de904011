"""Blocks, stacks and the model repeat every bit in one process, on every layout, however late ranks come."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.replay import Found, Layout, replay

pytestmark = pytest.mark.timeout(300)
TP2 = {"tp": 2, "etp": 1}
# The cells that every change runs; the others are for -m slow.
QUICK = ("one", "tp2-ep2-sp", "pp2-vpp2")
LAYOUTS = (
    Layout(),
    Layout(dp=2),
    Layout(**TP2, pattern="M*-M"),
    Layout(**TP2, sequence_parallel=True),
    Layout(dp=2, ep=2),
    Layout(**TP2, ep=2, sequence_parallel=True),
    Layout(pp=2, pattern="ME*|EM-"),
    Layout(pp=2, pattern="M|E*|EM|-"),
    Layout(pp=2, dp=2, pattern="ME*|EM-", sharded=False),
    Layout(**TP2, dp=2, ep=2, sequence_parallel=True),
)
CELLS = [
    pytest.param(layout, id=str(layout), marks=[] if str(layout) in QUICK else [pytest.mark.slow]) for layout in LAYOUTS
]


@functools.cache
def _seen(layout: Layout) -> list[Found]:
    return [found for (found,) in run_ranks(layout.world, replay, layout, (torch.bfloat16,), timeout_s=250)]


@pytest.mark.parametrize("layout", CELLS)
def test_a_replay_has_the_same_bits_everywhere(layout: Layout) -> None:
    for rank, by_subject in enumerate(_seen(layout)):
        for subject in layout.subjects:
            found = dict(by_subject[subject])
            assert found.pop("compared") > 10
            assert not found, f"rank {rank}, {subject}"


@pytest.mark.parametrize("layout", CELLS)
def test_another_order_of_rows_in_one_op_is_seen_where_it_acts(layout: Layout) -> None:
    """The control: the forward is the same, gradients and state are not."""
    for by_subject in _seen(layout):
        for subject in layout.subjects:
            planted = by_subject[f"planted: {subject}"]
            assert any(name.startswith("gradient") for name in planted), subject
            assert any(name.startswith("state: main_params") for name in planted), subject
            assert not any("forward" in name or "backward" in name for name in planted), planted


@pytest.mark.parametrize("layout", CELLS)
def test_generators_that_are_not_restored_are_seen(layout: Layout) -> None:
    """The control: a user's own draws decide what a step works on."""
    for by_subject in _seen(layout):
        for subject in layout.subjects:
            assert any("forward" in name for name in by_subject[f"generators: {subject}"]), subject
