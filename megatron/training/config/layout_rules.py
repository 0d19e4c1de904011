"""Rules about how the model is spread: what each parallel size must divide, and which batches fit."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import Problem
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    ATTENTION,
    DENSE,
    MAMBA,
    MOE,
    HybridPattern,
    pattern_problems,
)
from megatron.core.process_groups.topology import topology_problems
from megatron.training.config.resolve import batch_sizes, pattern_of
from megatron.training.config.run import RunConfig

_TP = "--tensor-model-parallel-size"


def layout_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Everything about the spread over ``world_size`` processes that cannot work, single values being in range."""
    parallel, model = config.parallel, config.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    problems = topology_problems(
        world_size, tp, pp, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    )
    if model.hybrid_layer_pattern is not None:
        problems += pattern_problems(model.hybrid_layer_pattern, pp)
    pattern = pattern_of(model)
    if pattern is not None:
        problems += [*_tensor_problems(config, pattern), *_expert_problems(config, pattern)]
    problems += _sequence_problems(config)
    problems += _logical_problems(config, world_size)
    problems += _global_balance_problems(config, world_size)
    problems += _batch_problems(config)
    problems += _overlap_problems(config)
    return problems


def _divides(size: int, flag: str, count: int, what: str, change: str) -> Iterator[Problem]:
    """A problem unless ``size`` divides ``count``."""
    if count % size:
        yield Problem(f"{what} {count} with {flag} {size}", f"a multiple of {size}", f"{change} or {flag}")


def _tensor_problems(config: RunConfig, pattern: HybridPattern) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if pattern.count(ATTENTION) and model.num_attention_heads is not None:
        flag = "--num-attention-heads"
        yield from _divides(tp, _TP, model.num_attention_heads, flag, flag)
        groups = model.key_value_groups
        if model.group_query_attention and groups % tp and tp % groups:
            yield Problem(
                f"--num-query-groups {groups} with {_TP} {tp}",
                f"a multiple or a divisor of {tp}",
                f"--num-query-groups or {_TP}",
            )
    if pattern.count(MAMBA):
        flag = "--mamba-num-groups"
        yield from _divides(tp, _TP, model.mamba_num_groups, flag, flag)
        if model.mamba_num_heads is not None and not model.mamba_num_groups % tp:
            yield from _divides(tp, _TP, model.mamba_num_heads, "--mamba-num-heads", "--mamba-num-heads")
    if pattern.count(DENSE) and model.ffn_hidden_size is not None:
        yield from _divides(tp, _TP, model.ffn_hidden_size, "--ffn-hidden-size", "--ffn-hidden-size")
    if pattern.mtp and model.hidden_size is not None:
        # The projection in front of each depth is cut by its rows.
        flag = "--hidden-size"
        yield from _divides(tp, _TP, model.hidden_size, f"/ parts in the pattern and {flag}", flag)
    shared = model.moe_shared_expert_intermediate_size
    if pattern.count(MOE) and shared is not None:
        flag = "--moe-shared-expert-intermediate-size"
        yield from _divides(tp, _TP, shared, flag, flag)


def _expert_problems(config: RunConfig, pattern: HybridPattern) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    flag = "--expert-model-parallel-size"
    if model.num_moe_experts is not None:
        yield from _divides(ep, flag, model.num_moe_experts, "--num-experts", "--num-experts")
    elif ep > 1:
        yield Problem(f"{flag} {ep} without experts", "--num-experts", f"add --num-experts, or leave out {flag}")
    if not pattern.count(MOE):
        return
    tp = parallel.tensor_model_parallel_size
    # Experts are cut like everything else unless they are told otherwise.
    flag = _TP if etp == tp else "--expert-tensor-parallel-size"
    if model.moe_ffn_hidden_size is not None:
        width = "--moe-ffn-hidden-size"
        change = width if etp != tp else f"{width}, --expert-tensor-parallel-size"
        yield from _divides(etp, flag, model.moe_ffn_hidden_size, width, change)
    if model.add_bias_linear and etp > 1:
        yield Problem(
            f"experts with biases (the default) and {flag} {etp}",
            "experts without biases, or whole experts on each rank",
            "add --disable-bias-linear, or --expert-tensor-parallel-size 1",
        )
    if tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"E layers in the pattern with {_TP} {tp} and no --sequence-parallel",
            "activations cut along the sequence, so that each token is routed once",
            "add --sequence-parallel",
        )


def _global_balance_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    parallel, kinds = config.parallel, [kind for kind, _ in config.model.balancing_losses]
    size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    ldp = parallel.logical_data_parallel_size
    if "global_aux_loss" in kinds and ldp is not None and world_size % size == 0 and ldp != world_size // size:
        yield Problem(
            f"--moe-router-load-balancing-type global_aux_loss with {ldp} logical shards on {world_size // size} "
            "data-parallel ranks",
            "as many ranks as shards: this loss reads the other shards' counts in the same pass",
            f"start {ldp * size} processes, or another --moe-router-load-balancing-type",
        )


def _sequence_problems(config: RunConfig) -> Iterator[Problem]:
    tp, length = config.parallel.tensor_model_parallel_size, config.model.seq_length
    if config.parallel.sequence_parallel and length is not None:
        yield from _divides(tp, f"--sequence-parallel, {_TP}", length, "--seq-length", "--seq-length")


def _logical_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ldp, block = parallel.logical_data_parallel_size, parallel.logical_reduce_block_size
    if ldp is None or world_size % (tp * pp):
        return
    dp, flag = world_size // (tp * pp), "--logical-data-parallel-size"
    launch = f"{world_size} process{'es' * (world_size != 1)} / ({tp} * {pp}) = {dp} data-parallel ranks"
    if ldp % dp:
        smaller = ", ".join(str(n) for n in range(1, ldp + 1) if ldp % n == 0)
        yield Problem(
            f"{flag} {ldp} with {launch}",
            f"data-parallel ranks that divide {ldp} ({smaller}), or a multiple of {dp} logical shards",
            f"the number of processes started (data-parallel ranks * {tp * pp}), or {flag}",
        )
    if block is not None and block > ldp:
        yield Problem(
            f"--logical-reduce-block-size {block} with {ldp} logical shards",
            f"at most {ldp}",
            "--logical-reduce-block-size",
        )


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
    training, ldp = config.training, config.parallel.logical_data_parallel_size
    micro, flag = training.micro_batch_size, "--global-batch-size"
    if training.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule"
    elif training.rampup_batch_size is not None:
        flag = "--rampup-batch-size"
    try:
        sizes = batch_sizes(training, config.model.seq_length)
    except ValueError as error:
        form = '"THRESHOLD:SIZE ...", from 0 on' if "schedule" in flag else "START INCREMENT SAMPLES up to that size"
        yield Problem(f"{flag}: {error}", form, flag)
        return
    if sizes is None or micro is None or ldp is None:
        return
    for batch in dict.fromkeys(size for _, size in sizes.steps):
        if batch % (micro * ldp):
            given = f"{flag} {batch}" if flag == "--global-batch-size" else f"{flag} with a batch of {batch}"
            yield Problem(
                f"{given} with --micro-batch-size {micro} and {ldp} logical data-parallel ranks",
                f"a multiple of {micro} * {ldp} = {micro * ldp}",
                f"{flag} or --micro-batch-size",
            )


def _overlap_problems(config: RunConfig) -> Iterator[Problem]:
    if not config.ddp.overlap_param_gather:
        return
    if not config.optimizer.use_distributed_optimizer:
        yield Problem(
            "--overlap-param-gather without --use-distributed-optimizer",
            "weights that are cut over the data-parallel ranks; otherwise every rank has them all",
            "add --use-distributed-optimizer, or leave out --overlap-param-gather",
        )
    if not config.ddp.overlap_grad_reduce:
        yield Problem(
            "--overlap-param-gather without --overlap-grad-reduce",
            "both, as in Megatron: the first tells which parameters a pass uses",
            "add --overlap-grad-reduce, or leave out --overlap-param-gather",
        )
