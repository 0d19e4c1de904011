"""dry_run: what a run would need, from the model built on the meta device, where a tensor is a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.distributed.bucket_plan import plan_buffers
from megatron.core.distributed.distributed_data_parallel import distinct_parameters
from megatron.core.models.hybrid.hybrid_layer_allocation import LAYER_SYMBOLS
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.core.optimizer.state_kinds import MOMENTS
from megatron.core.process_groups.groups import plan_process_groups
from megatron.core.process_groups.ordered_reduce import OrderedSums
from megatron.core.tensor_parallel.context import ModelContext
from megatron.training.config.resolve import (
    logical_layout,
    num_microbatches,
    pattern_of,
    resolve_vocabulary,
    topology_of,
)
from megatron.training.config.run import RunConfig
from megatron.training.data.provider import tokenizer_from
from megatron.training.loop.build import params_dtype
from megatron.training.observe.activations import (
    ActivationShape,
    head_bytes,
    in_flight_chunks,
    layer_bytes,
    prediction_bytes,
)
from megatron.training.observe.sizes import ENDS, PartSize, StateBytes, count_parameters, state_bytes
from megatron.training.setup.environment import find_launch, read_environment

_GIB = 2**30
_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNeed:
    """What the first rank of a pipeline stage needs: its layers, parameters held, bytes."""

    stage: int
    symbols: str
    parameters: int
    state: StateBytes
    activations: int


def dry_run(config: RunConfig) -> None:
    """Print parameter counts and what a rank of each pipeline stage needs; the first rank does, the others are silent.

    ``config`` is resolved for the number of processes to plan for.

    Raises:
        ConfigError, DamagedInputError: the tokenizer is missing, damaged or does not fit.
    """
    launch = find_launch(read_environment())
    if launch.rank:
        return
    tokenizer = tokenizer_from(config.tokenizer)
    config = resolve_vocabulary(config, tokenizer.vocab_size)
    world = config.distributed.dry_run_world_size or launch.world_size
    print("\n".join(report(config, tokenizer.vocab_size, world)), flush=True)


def report(config: RunConfig, vocab_size: int, world_size: int) -> list[str]:
    """The lines that ``dry_run`` prints, for a configuration whose vocabulary is known."""
    stages = _stages(config, vocab_size, world_size)
    needs = [stage_need(config, chunks, world_size) for chunks in stages]
    return [*_model_lines(config, _count(config, stages)), "", *_rank_lines(config, needs, world_size)]


def parameter_counts(config: RunConfig, vocab_size: int, world_size: int = 1) -> list[PartSize]:
    """Parameters of the model by kind, the same for every ``world_size`` that the configuration is resolved for."""
    return _count(config, _stages(config, vocab_size, world_size))


def _stages(config: RunConfig, vocab_size: int, world_size: int) -> list[list[HybridChunk]]:
    """The chunks of the first rank of every pipeline stage."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return [_chunks_of(config, vocab_size, world_size, pp) for pp in stages]


def _count(config: RunConfig, stages: Sequence[Sequence[HybridChunk]]) -> list[PartSize]:
    specs = [spec for chunks in stages for spec in _specs(chunks)]
    return count_parameters(specs, pattern_of(config.model).layers, config.model.moe_router_topk)


def stage_need(config: RunConfig, chunks: Sequence[HybridChunk], world_size: int) -> StageNeed:
    """What the rank needs whose chunks these are."""
    topology, specs = topology_of(config, world_size), _specs(chunks)
    stage = chunks[0].segment.pp_rank
    plans = plan_buffers(specs, dp=topology.dp, edp=topology.edp, config=config.ddp)
    return StageNeed(
        stage=stage,
        symbols="|".join(chunk.segment.symbols for chunk in chunks) + _behind(config, chunks),
        parameters=sum(len(spec.shards) * spec.shards[0].numel for spec in specs),
        state=state_bytes(
            plans,
            weight_bytes=params_dtype(config).itemsize,
            distributed_optimizer=config.optimizer.use_distributed_optimizer,
            num_moments=len(MOMENTS[config.optimizer.optimizer]),
            pipeline_size=topology.pp,
            num_passes=logical_layout(config).ldp // topology.dp,
        ),
        activations=_activations(config, chunks, world_size),
    )


def _activations(config: RunConfig, chunks: Sequence[HybridChunk], world_size: int) -> int:
    model, topology = config.model, topology_of(config, world_size)
    shape = ActivationShape(
        tokens=config.training.micro_batch_size * model.seq_length,
        tp=topology.tp,
        etp=topology.etp,
        cuts_sequence=config.parallel.sequence_parallel,
        activation_bytes=params_dtype(config).itemsize,
    )
    forwards = num_microbatches(config) * logical_layout(config).ldp // topology.dp
    passes = in_flight_chunks(chunks[0].segment.pp_rank, topology.pp, len(chunks), forwards)
    layers = sum(layer_bytes(symbol, model, shape) for chunk in chunks for symbol in chunk.segment.symbols)
    if not chunks[-1].is_last:
        return layers * passes // len(chunks)
    rows = config.tokenizer.padded_vocab_size
    depths = sum(prediction_bytes(symbols, model, rows, shape) for symbols in pattern_of(model).mtp)
    return layers * passes // len(chunks) + depths + head_bytes(model, rows, shape)


def _behind(config: RunConfig, chunks: Sequence[HybridChunk]) -> str:
    """The pattern's parts for multi-token prediction, on the stage that has them."""
    return "".join(f"/{symbols}" for symbols in pattern_of(config.model).mtp) if chunks[-1].is_last else ""


def _specs(chunks: Sequence[HybridChunk]) -> list[ParamSpec]:
    return [param.spec for param in distinct_parameters(chunks)]


def _chunks_of(config: RunConfig, vocab_size: int, world_size: int, pp: int) -> list[HybridChunk]:
    """The chunks of the first rank of a pipeline stage, as shapes. Ops do not matter to them: those of the CPU."""
    topology = topology_of(config, world_size)
    ops = build_table(ALL_OPS, NumericsConfig(), _CPU, params_dtype(config))
    context = ModelContext(
        groups=plan_process_groups(topology, topology.rank(tp=0, dp=0, pp=pp), _META),
        sums=OrderedSums(ops["blocked_fold"]),
        ops=ops,
        seed=config.training.seed,
        params_dtype=params_dtype(config),
        sequence_parallel=config.parallel.sequence_parallel,
        layout=logical_layout(config),
    )
    return build_hybrid_chunks(config.model, context, vocab_size)


def _model_lines(config: RunConfig, parts: Sequence[PartSize]) -> list[str]:
    mtp = [part for part in parts if part.part == ENDS["mtp"]]
    main = [part for part in parts if part not in mtp]
    total, active = sum(p.total for p in main), sum(p.active for p in main)
    lines = [
        f"parameters, with {config.tokenizer.padded_vocab_size:,} rows of vocabulary",
        f"  {'':<26}{'number':>7}{'each':>18}{'total':>20}{'active':>18}",
    ]
    for part in main:
        name = f"{part.part} {LAYER_SYMBOLS[part.part]}" if part.part in LAYER_SYMBOLS else part.part
        lines.append(_row(name, part))
    whole = PartSize(part="", count=0, total=total, active=active)
    embedding = sum(part.total for part in main if part.part == ENDS["embedding"])
    lines.append(_row("model", whole))
    lines.append(_row("without input embedding", replace(whole, total=total - embedding, active=active - embedding)))
    return lines + [_row(part.part, part) for part in mtp]


def _row(name: str, part: PartSize) -> str:
    count, each = (f"{part.count}", f"{part.total // part.count:,}") if part.count else ("", "")
    return f"  {name:<26}{count:>7}{each:>18}{part.total:>20,}{part.active:>18,}"


def _rank_lines(config: RunConfig, needs: Sequence[StageNeed], world_size: int) -> list[str]:
    topology = topology_of(config, world_size)
    names = ("weights", "gradients", "masters", "moments")
    lines = [
        f"needed by one rank of {world_size} (TP {topology.tp}, PP {topology.pp}, DP {topology.dp}, EP {topology.ep}, "
        f"ETP {topology.etp}, EDP {topology.edp}), in GiB",
        f"  {'stage':<7}{'parameters':>16}" + "".join(f"{n:>12}" for n in (*names, "activations", "sum")) + "  layers",
    ]
    for need in needs:
        parts = [getattr(need.state, name) for name in names] + [need.activations]
        columns = "".join(f"{part / _GIB:>12.2f}" for part in (*parts, sum(parts)))
        lines.append(f"  {need.stage:<7}{need.parameters:>16,}{columns}  {need.symbols}")
    return [
        *lines,
        "  Weights to moments are exact, padding included. Activations are an estimate of what the backward passes "
        "need",
        "  at the fullest moment, without recomputation, tokens spread evenly over experts. Not counted: communication",
        "  buffers of one bucket, temporaries within an op, the allocator's fragments, the CUDA context.",
    ]
