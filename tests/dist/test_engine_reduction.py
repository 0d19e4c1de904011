"""Final gradients follow the stated order bit for bit: blocked fold, TP fold, both pipeline ends, one factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold.reference import blocked_fold
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.toy_stage import DEFAULT_BUCKETS as DEFAULT
from tests.support.toy_stage import SpecStage, build_engine, stage_specs

Gradients = dict[str, torch.Tensor]


def _contribution(rank: int, name: str, leaf: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100_000 * leaf + 1000 * rank + sum(name.encode()))
    scale = 10.0 ** torch.randint(-6, 6, shape, generator=generator)
    return torch.randn(shape, generator=generator) * scale


def _final_gradients(
    sizes: dict[str, int], block: int, ddp: DistributedDataParallelConfig
) -> dict[bool, tuple[Gradients, Gradients]]:
    """By distributed optimizer off and on: contributions as added, and the gradient after reduction and gathering."""
    seen = {}
    for distributed in (False, True):
        groups = groups_for_test(**sizes)
        stage = SpecStage(stage_specs(groups))
        parallel, _ = build_engine([stage], groups, block=block, ddp=ddp, use_distributed_optimizer=distributed)
        parallel.zero_grad_buffer()
        added = {}
        for param in stage.params:
            leaves = param.main_grads[: 2 if groups.pp.size == 1 else 1]
            for leaf, main_grad in enumerate(leaves):
                mine = _contribution(groups.world.rank, param.spec.name, leaf, param.spec.local_shape)
                added[f"{param.spec.name}/{leaf}"] = mine
                main_grad.add_(mine)
        parallel.finalize_model_grads()
        for buffer in parallel.buffers:
            buffer.gather_grads()
        seen[distributed] = (added, {p.spec.name: p.main_grads[0].clone() for p in stage.params})
    return seen


def _expected(added: list[Gradients], name: str, members: list[list[int]], block: int, ldp: int) -> torch.Tensor:
    """Fold over the ranks of every list, then over the lists, then over the two leaves, then the factor."""
    leaves = sorted(key for key in added[0] if key.split("/")[0] == name)
    total = None
    for key in leaves:
        folds = [blocked_fold(torch.stack([added[r][key].view(-1) for r in ranks]), block) for ranks in members]
        part = blocked_fold(torch.stack(folds), len(folds))
        total = part if total is None else total + part
    return (total * torch.tensor(1.0 / ldp)).view(added[0][leaves[0]].shape)


def _gathered(world: int, block: int, ddp: DistributedDataParallelConfig, **sizes: int) -> list:
    return run_ranks(world, _final_gradients, sizes, block, ddp)


@pytest.mark.parametrize(("dp", "block"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (4, 4)])
def test_data_parallel_gradients_are_the_blocked_fold(dp: int, block: int) -> None:
    seen = _gathered(dp, block, DEFAULT)
    added = [of_rank[False][0] for of_rank in seen]
    for name in seen[0][False][1]:
        want = _expected(added, name, [list(range(dp))], block, dp)
        for of_rank in seen:
            assert same_bits(of_rank[False][1][name], want), name
            assert same_bits(of_rank[True][1][name], want), name


def test_another_block_gives_other_bits() -> None:
    added = [of_rank[False][0] for of_rank in _gathered(4, 2, DEFAULT)]
    two, four = (_expected(added, "large.weight", [[0, 1, 2, 3]], block, 4) for block in (2, 4))
    assert not same_bits(two, four)


def test_partial_gradients_of_copies_fold_over_tp_after_dp() -> None:
    seen = _gathered(4, 2, DEFAULT, tp=2)
    added = [of_rank[False][0] for of_rank in seen]
    for name in ("router.weight", "final_norm.weight"):
        want = _expected(added, name, [[0, 2], [1, 3]], 2, 2)
        assert all(same_bits(of_rank[d][1][name], want) for of_rank in seen for d in (False, True)), name
        assert not same_bits(want, _expected(added, name, [[0, 1], [2, 3]], 2, 2)), "the other order is the same"
    # Complete gradients of copies, and cuts, are folded over data-parallel ranks alone.
    for name in ("full.weight", "large.weight"):
        for tp in (0, 1):
            want = _expected(added, name, [[tp, tp + 2]], 2, 2)
            assert all(same_bits(seen[tp + dp][d][1][name], want) for dp in (0, 2) for d in (False, True)), name


@pytest.mark.parametrize(("sizes", "members"), [({"ep": 2}, [[0, 2], [1, 3]]), ({"tp": 2, "etp": 1}, [[0, 1, 2, 3]])])
def test_experts_fold_over_their_own_groups(sizes: dict[str, int], members: list[list[int]]) -> None:
    ldp = 4 // sizes.get("tp", 1)
    seen = _gathered(4, ldp, DEFAULT, **sizes)
    added = [of_rank[False][0] for of_rank in seen]
    for ranks in members:
        want = _expected(added, "experts.fc1.weight", [ranks], len(ranks), ldp)
        assert all(same_bits(seen[r][d][1]["experts.fc1.weight"], want) for r in ranks for d in (False, True))


def test_both_pipeline_ends_add_first_plus_last() -> None:
    seen = _gathered(4, 2, DEFAULT, pp=2)
    added = [of_rank[False][0] for of_rank in seen]
    first, last = (
        blocked_fold(torch.stack([added[r]["embedding.weight/0"].view(-1) for r in ranks]), 2)
        for ranks in ([0, 1], [2, 3])
    )
    want = (first + last) * torch.tensor(0.5)
    for of_rank in seen:
        assert all(same_bits(of_rank[d][1]["embedding.weight"].reshape(-1), want) for d in (False, True))


def _final_gradients_by_bucket_size(settings: list[DistributedDataParallelConfig]) -> list:
    return [_final_gradients({}, 2, ddp) for ddp in settings]


def test_bucket_sizes_do_not_change_a_bit() -> None:
    settings = [DEFAULT, replace(DEFAULT, ddp_bucket_size=1), replace(DEFAULT, ddp_num_buckets=3)]
    for of_rank in run_ranks(3, _final_gradients_by_bucket_size, settings):
        for name, want in of_rank[0][False][1].items():
            for of_setting in of_rank:
                assert same_bits(of_setting[True][1][name], want), name
                assert same_bits(of_setting[False][1][name], want), name
