"""Which ranks hold one copy of a stored tensor together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.contracts.param_spec import Initial, ParamSpec, cut_shard, replicated_shard
from megatron.core.optimizer.distrib_optimizer import StatePiece
from megatron.training.checkpoint.content import MASTERS, parameter_pieces


def copies(spec: ParamSpec, pp: int, tp: int, *, counted: bool) -> tuple[int, int]:
    """The number of the copy and the first element of a rank's piece, with two tensor-parallel ranks a stage."""
    piece = StatePiece(
        kind=MASTERS, name="w", spec=spec, counted=counted, shard=spec.shards[0].index, start=0, values=torch.zeros(8)
    )
    groups = SimpleNamespace(pp=SimpleNamespace(rank=pp), tp=SimpleNamespace(rank=tp, size=2), etp=None)
    (stored,) = parameter_pieces(SimpleNamespace(groups=groups, owned_pieces=lambda: [piece]), [MASTERS])
    return stored.copy, stored.begin


@pytest.mark.parametrize("tied", [(), ("first", "last")], ids=["one stage", "both ends"])
def test_ranks_that_hold_parts_hold_one_copy_and_ranks_that_hold_all_hold_one_each(tied: tuple) -> None:
    what = {"name": "w", "shape": (16,), "initial": Initial(kind="normal", a=1.0), "stages": tied}
    cut = [ParamSpec(**what, num_shards=2, shards=(cut_shard((16,), 0, tp, 2),)) for tp in range(2)]
    whole = ParamSpec(**what, num_shards=1, shards=(replicated_shard((16,)),), tp_replicated=True)
    assert [copies(cut[tp], 0, tp, counted=True) for tp in range(2)] == [(0, 0), (0, 8)]
    (first, begin), (second, behind) = (copies(cut[tp], 1, tp, counted=False) for tp in range(2))
    assert first == second != 0
    assert (begin, behind) == (0, 8)
    numbers = [copies(whole, pp, tp, counted=False)[0] for pp, tp in ((0, 1), (1, 0), (1, 1))]
    assert len({0, *numbers}) == 4
