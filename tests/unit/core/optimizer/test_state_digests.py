"""Pieces cut at the borders of a rank's own spans: nothing lost, nothing twice, and who owns what."""

from __future__ import annotations

import pytest
import torch

from megatron.core.contracts.flat_buffer import Piece, Span
from megatron.core.contracts.param_spec import Initial, ParamSpec, replicated_shard
from megatron.core.optimizer.state_digests import WEIGHTS, StateDigests, split_by_owner

SPEC = ParamSpec(
    name="w",
    shape=(5000,),
    num_shards=1,
    shards=(replicated_shard((5000,)),),
    initial=Initial(kind="constant", a=0.0),
)


def piece(start: int, length: int, offset: int) -> Piece:
    return Piece(spec=SPEC, shard=0, start=start, length=length, offset=offset)


def span(start: int, stop: int) -> Span:
    return Span(start=start, stop=stop, pieces=())


@pytest.mark.parametrize(
    ("owned", "expected"),
    [
        ([span(0, 8192)], [(0, 5000, True)]),
        ([span(8192, 9216)], [(0, 5000, False)]),
        ([span(1024, 2048)], [(0, 1024, False), (1024, 1024, True), (2048, 2952, False)]),
        ([span(0, 2048), span(4096, 8192)], [(0, 2048, True), (2048, 2048, False), (4096, 904, True)]),
    ],
)
def test_pieces_are_cut_at_the_borders_of_owned_spans(owned: list[Span], expected: list[tuple]):
    parts = list(split_by_owner([piece(0, 5000, 0)], owned))
    assert [(p.offset, p.length, own) for p, own in parts] == expected


def test_a_part_begins_where_its_shard_says():
    parts = [p for p, _ in split_by_owner([piece(1024, 3000, 2048)], [span(3072, 4096)])]
    assert [(p.start, p.offset, p.length) for p in parts] == [(1024, 2048, 1024), (2048, 3072, 1024), (3072, 4096, 952)]


def test_a_rank_without_parameters_has_digests_of_nothing():
    """A pipeline stage in the middle may have no layers."""
    digests = StateDigests((), lambda *_: None, lambda _: True, kinds=("main_params",), device=torch.device("cpu"))
    for whole in digests.totals():
        assert {kind: total.tolist() for kind, total in whole.items()} == {WEIGHTS: [0, 0], "main_params": [0, 0]}
    for held, values in (digests.weights(), digests.state(), digests.gradients()):
        assert held == []
        assert values.shape == (0, 2)
