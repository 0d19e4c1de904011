"""How many collectives a step makes, and of how many elements: what data parallelism costs, and what each layer."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.core.ops.norm_blocks.limbs import SIZE
from megatron.core.process_groups.collectives import maximum
from megatron.core.process_groups.probed import probe_groups
from megatron.core.transformer.moe import dispatcher
from tests.support.counting import Counted, CountingProbe
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.tiny import VOCAB_SIZE, attach_main_grads, run_microbatches, tiny_config, tiny_context
from tests.support.training import TIED, TINY, build_here

SHARED = "--hybrid-layer-pattern ME --logical-data-parallel-size 4 --global-batch-size 8 --use-distributed-optimizer"
MICROBATCHES = 2


def _step(flags: str, base: str, planted: bool) -> tuple[Counted, Counted]:
    """Rank function: what a step's collectives are, and what they are by the plan of the buffers."""
    probe = CountingProbe()
    run = build_here(f"{SHARED} {flags}", base, probe=probe)
    reader, ddp, dp = run.reader(run.splits.train), run.step.ddp, run.groups.dp
    start = ddp.zero_grad_buffer
    if planted:
        ddp.zero_grad_buffer = lambda: (maximum(dp, torch.zeros(1)), start())[1]
    probe.taken()
    run.step.run(reader, 1, 0)
    return probe.taken(), _planned(ddp.buffers, dp.size, run.step.shape.reported.width)


def _planned(buffers: Any, dp: int, width: int) -> Counted:
    """What four logical shards on ``dp`` ranks cost, from the sizes of buckets alone.

    Each of the 4 / DP passes gives every bucket of every gradient buffer to one reduce-scatter; weights are gathered
    once. A parameter of both ends has two gradient buffers here. Besides those: the losses, the experts' counts, and
    the numbers of norm, zeros and finiteness.
    """
    passes, wanted = 4 // dp, Counter()
    calls: Counter[str] = Counter()
    for buffer in buffers:
        axis, buckets, numel = buffer.group.axis, len(buffer.plan.buckets), buffer.plan.numel
        calls[f"{axis} all_to_all_terms"] += passes * buckets * len(buffer.grads)
        wanted[f"{axis} all_to_all_terms"] += passes * numel * len(buffer.grads)
        calls[f"{axis} all_gather"] += buckets
        wanted[f"{axis} all_gather"] += numel // dp
    for key, elements in (
        ("dp all_gather", passes * MICROBATCHES * width),
        ("tp_dp sum_integers", 4),
        ("world sum_integers", SIZE + 2),
    ):
        calls[key] += 1
        wanted[key] += elements
    return {key: (calls[key], wanted[key]) for key in sorted(calls)}


def _of_step(dp: int, flags: str = "", base: str = TINY, planted: bool = False) -> tuple[Counted, Counted]:
    first, *others = run_ranks(dp, _step, flags, base, planted)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("base", [TINY, TIED])
def test_logical_shards_cost_no_more_than_their_passes(base: str) -> None:
    """DP = LDP: every gradient is given to one reduce-scatter and every weight gathered once; half as many ranks give
    each bucket to one reduce-scatter more, whose elements differ by the padding of a bucket's end alone."""
    (whole, planned), (half, planned_half) = (_of_step(dp, base=base) for dp in (4, 2))
    assert whole == planned
    assert half == planned_half
    # A bucket for each type of weights; a weight of both ends has two more of its own.
    assert whole["dp all_to_all_terms"][0] == (2 if base is TINY else 4)
    for axis in ("dp", "edp"):
        key = f"{axis} all_to_all_terms"
        assert half[key][0] == 2 * whole[key][0]
        assert 0 <= 2 * whole[key][1] - half[key][1] <= whole[key][0] * 2 * 2 * 1024
    assert _of_step(1)[0] == {}


def test_one_collective_more_is_seen() -> None:
    counted, planned = _of_step(2, planted=True)
    assert counted == {**planned, "dp maximum": (1, 1)}
    assert counted != planned


ENDS = Counter({"tp all_to_all_terms": 2, "tp all_gather": 4})
"""Embedding: rows of one rank to the positions of each, and their gradients back. Output layer: its input both ways,
its gradient back, three numbers a token."""
TP_LAYER = Counter({"tp all_gather": 3, "tp all_to_all_terms": 2})
"""Input gathered, output scattered; output's gradient gathered, the input's scattered, the input gathered again."""
MOE = Counter({"tp sum_integers": 1, "expert all_to_all": 1, "expert all_to_all_rows": 6})
"""Counts for the balancing loss and for the exchange; rows and their weights there and rows back, and so gradients."""
GATHERED = Counter({"tp sum_integers": 1, "expert all_gather": 4, "expert all_to_all_rows": 4})
"""Counts, rows of tokens, tokens, weights; outputs back, their gradients out, gradients of rows and weights back."""
LOSSES = Counter({"tp all_gather": 1})
"""Balancing losses of all layers of a chunk at once."""
ALLTOALL, ALLGATHER = ({"moe_token_dispatcher_type": kind} for kind in ("alltoall", "allgather"))


def _layers(cases: list[tuple[str, dict[str, Any]]], twice: bool) -> list[Counter[str]]:
    """Rank function: collectives of one micro-batch, forward and backward, over TP2 with sequence parallelism and EP2;
    ``twice``: what comes home from experts is exchanged another time."""
    home = dispatcher._homeward
    again = mock.patch.object(dispatcher, "_homeward", (lambda *a: (home(*a), home(*a))[1]) if twice else home)
    counted = []
    for pattern, changes in cases:
        probe = CountingProbe()
        context = tiny_context(probe_groups(groups_for_test(tp=2, ep=2, etp=1), probe), sequence_parallel=True)
        config = tiny_config(hybrid_layer_pattern=pattern, seq_length=16, max_position_embeddings=16, **changes)
        chunks = build_hybrid_chunks(config, context, VOCAB_SIZE)
        attach_main_grads(chunks)
        probe.taken()
        with again:
            run_microbatches(chunks, [(0, 0)], 1, 1)
        counted.append(Counter({key: calls for key, (calls, _) in probe.taken().items()}))
    return counted


def _times(count: int, per_layer: Counter[str]) -> Counter[str]:
    return Counter({key: count * calls for key, calls in per_layer.items()})


CASES: list[tuple[str, dict[str, Any], Counter[str]]] = [
    ("M", {}, ENDS + TP_LAYER),
    ("*-", {}, ENDS + _times(2, TP_LAYER)),
    ("EE", ALLTOALL, ENDS + LOSSES + _times(2, TP_LAYER + MOE)),
    ("E", {**ALLTOALL, "moe_shared_expert_intermediate_size": None}, ENDS + LOSSES + MOE),
    ("E", ALLGATHER, ENDS + LOSSES + TP_LAYER + GATHERED),
]


def test_every_layer_has_its_collectives_and_no_more() -> None:
    for seen in run_ranks(2, _layers, [(pattern, changes) for pattern, changes, _ in CASES], False):
        assert seen == [wanted for _, _, wanted in CASES]


def test_one_exchange_more_of_a_layer_is_seen() -> None:
    for (seen,) in run_ranks(2, _layers, [("E", ALLTOALL)], True):
        assert seen - (ENDS + LOSSES + TP_LAYER + MOE) == Counter({"expert all_to_all_rows": 3})
