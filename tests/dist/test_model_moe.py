"""Faults of mixture-of-experts training reported elsewhere, on small rank counts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.contracts.batch import Batch, Microbatch
from megatron.core.digest.bits import same_bits
from megatron.core.models.hybrid.hybrid_model import build_hybrid_chunks
from megatron.core.transformer.moe import dispatcher
from megatron.core.transformer.moe.dispatcher import places_here
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.tiny import (
    VOCAB_SIZE,
    Layout,
    Step,
    attach_main_grads,
    gather_whole,
    relative_error,
    run_microbatches,
    tiny_batch,
    tiny_config,
    tiny_context,
    tiny_gradients,
)

TOLERANCE = 1e-5


SHORT = {"seq_length": 16, "hybrid_layer_pattern": "ME"}


@pytest.mark.parametrize(("ep", "num_microbatches"), [(1, 1), (2, 4), (4, 1)])
def test_expert_gradients_do_not_depend_on_expert_parallelism(ep: int, num_microbatches: int) -> None:
    """BR-04. The sum over four logical shards, on four ranks with any expert-parallel size and on one rank."""
    want = tiny_gradients(Layout(), 4, SHORT, num_microbatches)
    got = run_ranks(4, tiny_gradients, Layout(dp=4, ep=ep), 4, SHORT, num_microbatches)[0]
    for name, grad in want.grads.items():
        assert relative_error(got.grads[name], grad) <= TOLERANCE, name


def _both_dispatchers(layout: Layout, changes: dict[str, Any]) -> tuple[Step, Step]:
    sent, gathered = (
        tiny_gradients(layout, layout.dp, {**SHORT, **changes, "moe_token_dispatcher_type": kind}, 2)
        for kind in ("alltoall", "allgather")
    )
    return sent, gathered


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}, {"moe_latent_size": 8}],
    ids=["plain", "capacity", "latent"],
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, ep=4),
        Layout(dp=2, tp=2, sequence_parallel=True, ep=4, etp=1),
        Layout(dp=2, tp=2, sequence_parallel=True, ep=2, etp=2),
    ],
    ids=["EP4", "TP2xEP4", "TP2xEP2xETP2"],
)
def test_gathered_tokens_give_the_bits_of_sent_ones(layout: Layout, changes: dict[str, Any]) -> None:
    for sent, gathered in run_ranks(4, _both_dispatchers, layout, changes):
        assert len(sent.grads) > 5
        for name, grad in sent.grads.items():
            assert same_bits(gathered.grads[name], grad), name


def _one_row_elsewhere(layout: Layout) -> tuple[Step, Step]:
    def swapped(*args: Any) -> torch.Tensor:
        places = places_here(*args)
        return places.roll(1, dims=0)

    with mock.patch.object(dispatcher, "places_here", swapped):
        return _both_dispatchers(layout, {})


def test_gathered_tokens_in_other_rows_are_seen() -> None:
    """The control."""
    layout = Layout(dp=2, ep=2)
    for sent, gathered in run_ranks(2, _one_row_elsewhere, layout):
        assert not all(same_bits(gathered.grads[name], grad) for name, grad in sent.grads.items())


def _same_sequence(
    layout: Layout, size: int, num_microbatches: int, changes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Router gradients when every slot holds the same sequence, averaged over micro-batches, or over all tokens where
    the loss is one per token."""
    groups = groups_for_test(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    context = tiny_context(groups, sequence_parallel=layout.sequence_parallel)
    config = tiny_config(**{"moe_aux_loss_coeff": (100.0,), **changes})
    chunks = build_hybrid_chunks(config, context, VOCAB_SIZE)
    params = attach_main_grads(chunks)
    one = tiny_batch(0, 0)
    batch = Batch(
        tokens_BS=one.tokens_BS.expand(size, -1).contiguous(),
        labels_BS=one.labels_BS.expand(size, -1).contiguous(),
        loss_mask_BS=one.loss_mask_BS.expand(size, -1).contiguous(),
        position_ids_BS=one.position_ids_BS.expand(size, -1).contiguous(),
    )
    for index in range(num_microbatches):
        place = Microbatch(iteration=1, shard=0, index=index, num_microbatches=num_microbatches)
        chunks[0](batch, None, place)[0].backward()
    divisor = num_microbatches * batch.loss_mask_BS.sum().item() if config.calculate_per_token_loss else 1.0
    return {name: grad / divisor for name, grad in gather_whole(groups, params).items() if "router" in name}


KINDS = ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_auxiliary_loss_keeps_its_scale(kind: str) -> None:
    """BR-09: micro-batch size, number of micro-batches, tensor parallelism and the loss's unit leave the router's
    gradient alone, also where tokens are masked."""
    changes: dict[str, Any] = {"moe_router_load_balancing_type": (kind,), "hybrid_layer_pattern": "ME*E"}
    if kind == "z_loss":
        changes |= {"moe_router_load_balancing_type": ("none",), "moe_z_loss_coeff": 100.0}
    want = _same_sequence(Layout(), 1, 1, changes)
    assert all(grad.norm() > 1.0 for grad in want.values())
    others = [_same_sequence(Layout(), 2, 1, changes), _same_sequence(Layout(), 1, 4, changes)]
    cut = Layout(tp=2, sequence_parallel=True, etp=1)
    others.append(run_ranks(2, _same_sequence, cut, 2, 2, changes)[0])
    per_token = {**changes, "calculate_per_token_loss": True}
    others += [_same_sequence(Layout(), 1, 1, per_token), _same_sequence(Layout(), 2, 4, per_token)]
    for other in others:
        for name, grad in want.items():
            assert relative_error(other[name], grad) <= TOLERANCE, name


def _idle_rank(layout: Layout, changes: dict[str, Any]) -> tuple[dict, dict[str, torch.Tensor]]:
    """A step in which no token goes to experts 4 to 7."""
    groups = groups_for_test(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    context = tiny_context(groups, sequence_parallel=layout.sequence_parallel, ldp=2)
    config = tiny_config(num_moe_experts=8, moe_router_topk=1, seq_length=4, **changes)
    chunks = build_hybrid_chunks(config, context, VOCAB_SIZE)
    for router in chunks[0].balanced_routers():
        router.expert_bias_E[4:] = -1e9
    params = attach_main_grads(chunks)
    losses, _ = run_microbatches(chunks, [(v, 0) for v in range(groups.dp.rank, 2, groups.dp.size)], 1, 1)
    return losses, gather_whole(groups, params)


@pytest.mark.parametrize("changes", [{}, {"moe_expert_capacity_factor": 1.0}, {"moe_latent_size": 16}])
def test_a_rank_without_tokens_takes_part_and_gets_zero_gradients(changes: dict[str, Any]) -> None:
    """BR-11, also where tokens are dropped."""
    want_losses, want = _idle_rank(Layout(), changes)
    for losses, grads in run_ranks(2, _idle_rank, Layout(dp=2, ep=2), changes):
        assert all(loss == pytest.approx(want_losses[place], rel=TOLERANCE) for place, loss in losses.items())
        for name, grad in want.items():
            assert relative_error(grads[name], grad) <= TOLERANCE, name
            assert grads[name].isfinite().all()
            if ".experts." in name:
                assert not grads[name][4:].any()
                assert grads[name][:4].any()


def _ties(layout: Layout, changes: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Counts over a step, and the experts of each of this rank's tokens, where all tokens and all scores are equal."""
    groups = groups_for_test(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    context = tiny_context(groups, sequence_parallel=layout.sequence_parallel, ldp=2)
    chunks = build_hybrid_chunks(tiny_config(num_moe_experts=16, **SHORT, **changes), context, VOCAB_SIZE)
    attach_main_grads(chunks)
    (router,) = chunks[0].balanced_routers()
    router.weight.data.zero_()
    ids: list[list[int]] = []
    router.register_forward_hook(lambda module, given, routing: ids.extend(routing.ids_Tk.tolist()))
    run_microbatches(chunks, [(v, 0) for v in range(groups.dp.rank, 2, groups.dp.size)], 1, 1)
    return router.token_counts_E.tolist(), ids


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2), Layout(tp=2, sequence_parallel=True, etp=1)])
def test_ties_go_to_the_lowest_experts_on_every_layout_and_when_recomputed(layout: Layout) -> None:
    """BR-19."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for changes, times in (({}, 1), (full, 2)):
        ranks = run_ranks(layout.world, _ties, layout, changes)
        assert torch.tensor([counts for counts, _ in ranks]).sum(0).tolist() == [32, 32] + [0] * 14
        assert all(ids == [[0, 1]] * len(ids) for _, ids in ranks)
        assert sum(len(ids) for _, ids in ranks) == 32 * times


def _counts(layout: Layout) -> Step:
    return tiny_gradients(layout, 2, {"seq_length": 512, "hybrid_layer_pattern": "E-"}, 1, 2)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2), Layout(tp=2, sequence_parallel=True, etp=1)])
def test_token_counts_are_exact_on_every_layout(layout: Layout) -> None:
    """BR-07: experts see more than 256 tokens; counts over ranks are the integers of one rank."""
    want = _counts(Layout()).token_counts
    steps = run_ranks(layout.world, _counts, layout)
    for name, counts in want.items():
        assert torch.tensor([step.token_counts[name] for step in steps]).sum(0).tolist() == counts
        assert max(counts) > 256
