"""The optimizer's bits are the same on every layout, each logical parameter counts once, a bad gradient stops all."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.config.optimizer import DistributedDataParallelConfig
from megatron.core.contracts.param_spec import Initial, ParamSpec, replicated_shard
from megatron.core.digest.bits import digest_hex, same_bits
from megatron.core.ops.norm_blocks.limbs import norm_from_limbs
from megatron.core.ops.norm_blocks.reference import norm_blocks
from megatron.core.process_groups.collectives import all_gather
from megatron.core.process_groups.groups import ProcessGroups
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.toy_stage import SpecStage, build_engine, local_part, stage_specs, whole_gradient

STEPS = 3
SMALL_BUCKETS = DistributedDataParallelConfig(ddp_bucket_size=3000)

LAYOUTS = [
    {"world": 2},
    {"world": 4},
    {"world": 2, "tp": 2},
    {"world": 2, "tp": 2, "etp": 1, "ep": 2},
    {"world": 2, "ep": 2},
    {"world": 4, "ep": 4},
    {"world": 4, "tp": 2, "etp": 1, "ep": 2},
    {"world": 4, "tp": 2, "etp": 1, "ep": 4},
    {"world": 4, "pp": 2},
    {"world": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 1},
]


def _train(
    sizes: dict[str, int], dtype: torch.dtype, hidden: int = 9, only: tuple[str, ...] = ()
) -> list[dict[str, object]]:
    """Three steps with the distributed optimizer off and on (and other buckets): everything that must agree."""
    groups = groups_for_test(**sizes)
    out = []
    for distributed, ddp in ((False, DistributedDataParallelConfig()), (True, SMALL_BUCKETS)):
        stage = SpecStage([spec for spec in stage_specs(groups, hidden) if not only or spec.name in only], dtype)
        parallel, optimizer = build_engine(
            [stage], groups, ddp=ddp, use_distributed_optimizer=distributed, clip_grad=0.01
        )
        seen: dict[str, object] = {}
        for step in range(STEPS):
            parallel.zero_grad_buffer()
            stage.add_exact_gradients(groups, step)
            parallel.finalize_model_grads()
            last = step == STEPS - 1
            gradients = optimizer.held_digests.gradients()
            outcome = optimizer.step(
                lr=0.01, weight_decay=0.1 + step, iteration=step + 1, count_zeros=True, digest=last, digest_grad=last
            )
            seen[f"step {step}"] = (outcome.grad_norm.hex(), outcome.clip_factor.hex(), outcome.num_zeros)
        assert optimizer.written is not None
        as_read_by_step = optimizer.held_digests.gradients(optimizer.written)
        assert as_read_by_step[0] == gradients[0] == optimizer.held_digests.gradients_held
        assert torch.equal(as_read_by_step[1], gradients[1])
        as_written, as_read = optimizer.digests_of_step(), (optimizer.state_digests(), optimizer.local_digests())
        for ours, theirs in zip(as_written, as_read, strict=True):
            assert all(torch.equal(ours[kind], theirs[kind]) for kind in theirs)
        seen["params norm"] = optimizer.params_norm().hex()
        seen |= {kind: digest_hex(total) for kind, total in optimizer.state_digests().items()}
        seen["steps"] = optimizer.step_count
        seen["copies agree"] = _copies_agree(stage, groups)
        seen["weights"] = {param.spec.name: (param.spec, param.data.clone()) for param in stage.params}
        out.append(seen)
    return out


def _copies_agree(stage: SpecStage, groups: ProcessGroups) -> bool:
    """Whether ranks that should hold the same weight do: over DP (experts: EDP), and over TP where it is copied."""
    agree = True
    for param in stage.params:
        held = [groups.edp] if param.spec.expert else [groups.dp]
        held += [groups.tp] if param.spec.tp_replicated else []
        for group in held:
            copies = all_gather(group, param.data.contiguous())
            agree &= all(same_bits(copy, copies[0]) for copy in copies)
    return agree


Seen = dict[str, object]


@pytest.fixture(scope="module")
def one_rank() -> dict[torch.dtype, Seen]:
    """What one rank sees."""
    return {dtype: run_ranks(1, _train, {}, dtype)[0][0] for dtype in (torch.float32, torch.bfloat16)}


def _comparable(seen: Seen) -> Seen:
    return {key: value for key, value in seen.items() if key != "weights"}


def _same_weights(seen: Seen, whole: Seen) -> bool:
    return all(
        same_bits(local_part(whole["weights"][name][1], spec), values)
        for name, (spec, values) in seen["weights"].items()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norm_zeros_and_state_are_those_of_one_rank(layout: dict[str, int], one_rank: dict[torch.dtype, Seen]) -> None:
    want = one_rank[torch.bfloat16 if layout["world"] == 4 else torch.float32]
    sizes = {axis: size for axis, size in layout.items() if axis != "world"}
    dtype = torch.bfloat16 if layout["world"] == 4 else torch.float32
    # Digests and summation blocks count from a logical shard's start, and the tensor-parallel size cuts those.
    same_shards = "tp" not in layout
    for of_rank in run_ranks(layout["world"], _train, sizes, dtype):
        for seen in of_rank:
            assert _same_weights(seen, want)
            assert _comparable(seen) == _comparable(of_rank[0])
            for key, value in _comparable(want).items():
                if same_shards or key in ("steps", "copies agree") or key.startswith("step "):
                    assert seen[key] == value, key


def test_norm_and_zeros_are_those_of_the_whole_gradient(one_rank: dict) -> None:
    groups = groups_for_test()
    wholes = [whole_gradient(spec.name, spec.shape, 0) for spec in stage_specs(groups)]
    blocks = []
    for spec in stage_specs(groups):
        shards = whole_gradient(spec.name, spec.shape, 0)
        blocks += [norm_blocks(shard.reshape(-1)) for shard in (shards if spec.expert else [shards])]
    norm = norm_from_limbs(torch.stack(blocks).sum(0).tolist())
    exact = math.sqrt(sum(int((whole.double() ** 2).sum()) for whole in wholes))
    zeros = sum(int((whole == 0).sum()) for whole in wholes)
    assert norm == exact
    factor = 0.01 / (norm + 1e-6)
    assert one_rank[torch.float32]["step 0"] == (norm.hex(), factor.hex(), zeros)


def test_bf16_weights_are_the_cast_of_masters_that_fp32_shares(one_rank: dict) -> None:
    assert one_rank[torch.float32]["main_params"] == one_rank[torch.bfloat16]["main_params"]
    assert one_rank[torch.float32]["params"] != one_rank[torch.bfloat16]["params"]
    assert one_rank[torch.float32]["params"] == one_rank[torch.float32]["main_params"]


def _train_tiny() -> tuple[list[Seen], int]:
    """As ``_train`` with hidden size 8 and no large parameter; and how many elements this rank owns."""
    small = ("norm.weight", "router.weight", "in_proj.weight", "final_norm.weight", "full.weight", "A_log")
    seen = _train({}, torch.float32, hidden=8, only=small)
    groups = groups_for_test()
    stage = SpecStage([spec for spec in stage_specs(groups, 8) if spec.name in small])
    parallel, _ = build_engine([stage], groups)
    return seen, sum(p.length for buffer in parallel.buffers for span in buffer.owned for p in span.pieces)


def test_ranks_that_hold_only_padding() -> None:
    by_dp = {dp: run_ranks(dp, _train_tiny) for dp in (1, 2, 3, 8)}
    total = by_dp[1][0][1]
    want = _comparable(by_dp[1][0][0][0])
    for dp, of_ranks in by_dp.items():
        owned = [numel for _, numel in of_ranks]
        assert sum(owned) == total
        assert (0 in owned) == (dp == 8)
        first = _comparable(of_ranks[0][0][0])
        for seen, _ in of_ranks:
            assert [_comparable(both) for both in seen] == [first, first]
        # A third is no binary fraction: the mean of three equal gradients is another number.
        assert dp == 3 or first == want


def _digests_with_one_bit_flipped(where: str) -> list[str]:
    """Global digest before and after rank 1 flips the lowest bit of one element; then its local digest."""
    groups = groups_for_test()
    _, optimizer = build_engine([SpecStage(stage_specs(groups))], groups, use_distributed_optimizer=True)
    before = optimizer.state_digests()
    local = optimizer.local_digests()
    if groups.world.rank == 1:
        state = optimizer.states[0]
        at = state.buffer.owned[0].pieces[0].offset
        element = state.buffer.weights[at:] if where == "params" else state.tensors()[where]
        element[:1].view(torch.int32).bitwise_xor_(1)
    after, local_after = optimizer.state_digests(), optimizer.local_digests()
    return [digest_hex(d[where]) for d in (before, after, local, local_after)]


@pytest.mark.parametrize("where", ["params", "main_params", "exp_avg"])
def test_one_flipped_bit_shows(where: str) -> None:
    zero, one = run_ranks(2, _digests_with_one_bit_flipped, where)
    assert zero[:2] == one[:2]
    assert zero[0] != zero[1]
    assert zero[2] == zero[3]
    assert one[2] != one[3]


def _spoiled_step(sizes: dict[str, int], spoil: dict[int, float], distributed: bool) -> tuple[str, bool, int]:
    """One good step, then one in which the ranks in ``spoil`` have a bad element in one parameter."""
    groups = groups_for_test(**sizes)
    stage = SpecStage(stage_specs(groups))
    parallel, optimizer = build_engine([stage], groups, use_distributed_optimizer=distributed)
    _step(stage, parallel, optimizer, groups, 1)
    before = [t.clone() for state in optimizer.states for t in (state.buffer.weights, *state.tensors().values())]
    try:
        _step(stage, parallel, optimizer, groups, 2, spoil.get(groups.world.rank))
        message = ""
    except TrainingStoppedError as error:
        message = str(error)
    after = [t for state in optimizer.states for t in (state.buffer.weights, *state.tensors().values())]
    return message, all(same_bits(a, b) for a, b in zip(before, after, strict=True)), optimizer.step_count


def _step(
    stage: SpecStage, parallel: object, optimizer: object, groups: ProcessGroups, step: int, bad: float | None = None
) -> None:
    parallel.zero_grad_buffer()
    stage.add_exact_gradients(groups, step)
    if bad is not None:
        target = next(p for p in stage.params if p.spec.name in ("full.weight", "norm.weight"))
        target.main_grads[0].view(-1)[5] = bad
    parallel.finalize_model_grads()
    optimizer.step(lr=0.01, weight_decay=0.1, iteration=step)


def _spoiled_steps(sizes: dict[str, int], spoil: dict[int, float]) -> list[tuple[str, bool, int]]:
    return [_spoiled_step(sizes, spoil, distributed) for distributed in (False, True)]


@pytest.mark.parametrize(
    ("sizes", "bad"),
    [({}, math.nan), ({}, -math.inf), ({"tp": 2}, math.nan), ({"ep": 2}, math.inf), ({"pp": 2}, math.nan)],
    ids=str,
)
def test_a_bad_element_on_one_rank_stops_all_and_is_named(sizes: dict[str, int], bad: float) -> None:
    seen = run_ranks(2, _spoiled_steps, sizes, {1: bad})
    assert seen[0] == seen[1]
    for message, untouched, steps in seen[0]:
        assert untouched
        assert steps == 1
        assert "iteration 2" in message
        assert "rank 1 (" in message
        assert "rank 0 (" not in message
        assert "full.weight" in message or "norm.weight" in message


def test_a_sum_that_overflows_is_named_as_that() -> None:
    (message, untouched, steps), other = run_ranks(2, _spoiled_step, {}, {0: 3e38, 1: 3e38}, True)
    assert other[0] == message
    assert untouched
    assert steps == 1
    assert "finite on every rank, but the sum over ranks overflows: rank " in message


def test_a_good_step_does_not_stop() -> None:
    for message, untouched, steps in run_ranks(2, _spoiled_step, {}, {}, True):
        assert (message, untouched, steps) == ("", False, 2)


def _counted_twice() -> tuple[str, str]:
    """Control: the norm if copies on both tensor-parallel ranks counted, next to the real one."""
    groups = groups_for_test(tp=2)
    stages = SpecStage(stage_specs(groups)), SpecStage([_uncopied(spec) for spec in stage_specs(groups)])
    norms = []
    for stage in stages:
        parallel, optimizer = build_engine([stage], groups)
        stage.add_exact_gradients(groups, 0)
        parallel.finalize_model_grads()
        norms.append(optimizer.step(lr=0.01, weight_decay=0.0, iteration=1).grad_norm.hex())
    return norms[0], norms[1]


def _uncopied(spec: ParamSpec) -> ParamSpec:
    facts = {name: getattr(spec, name) for name in ParamSpec.__slots__}
    return ParamSpec(**{**facts, "tp_replicated": False})


def test_copies_counted_twice_would_be_seen(one_rank: dict) -> None:
    for right, wrong in run_ranks(2, _counted_twice):
        assert right == one_rank[torch.float32]["step 0"][0]
        assert wrong != right


def test_weights_of_another_seed_are_refused() -> None:
    groups = groups_for_test()
    stage = SpecStage(stage_specs(groups))
    stage.params[0].data[0, 0] += 1.0
    with pytest.raises(ValueError, match=r"embedding.weight does not hold the initial values"):
        build_engine([stage], groups)


def test_a_gradient_in_dot_grad_is_refused() -> None:
    groups = groups_for_test()
    shape = (5,)
    spec = ParamSpec(
        name="lost",
        shape=shape,
        num_shards=1,
        shards=(replicated_shard(shape),),
        initial=Initial(kind="constant", a=1.0),
    )
    stage = SpecStage([spec])
    parallel, _ = build_engine([stage], groups)
    stage.params[0].sum().backward()
    with pytest.raises(RuntimeError, match="would be lost: \\['lost'\\]"):
        parallel.finalize_model_grads()
