"""Real training steps inside the rank pool: the command line of a user, everything but the process start."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.digest.bits import digest_hex
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.core.process_groups.groups import Placement, create_process_groups
from megatron.core.process_groups.probed import probe_groups
from megatron.core.trace.probe import Probe
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.resolve import logical_layout, resolve_vocabulary, topology_of
from megatron.training.config.validate import resolve_and_validate
from megatron.training.data.provider import tokenizer_from
from megatron.training.loop.build import Run, assemble_run, params_dtype
from megatron.training.observe.step_record import StepMetrics
from megatron.training.setup.environment import Launch
from tests.support.mock_indices import remember_indices

remember_indices()

TINY = """
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2
    --moe-router-load-balancing-type seq_aux_loss
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --mock-data --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 509 --train-iters 8 --lr 1e-3 --lr-warmup-iters 2 --clip-grad 1.0
    --deterministic-mode
"""
"""The field's tiny hybrid recipe, without pattern and batch size."""
TIED = TINY.replace("--untie-embeddings-and-output-weights", "")
"""The same with one weight for embeddings and output layer."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank saw: the steps' metrics, the last step's final gradient by (parameter, shard, start), digests of
    the state after the last step (equal on all ranks)."""

    steps: list[StepMetrics]
    grads: list[tuple[ParamSpec, int, int, torch.Tensor]]
    digests: dict[str, str]


def build_here(flags: str, base: str = TINY, nodes: tuple[int, ...] | None = None, probe: Probe | None = None) -> Run:
    """A run on the ranks that are running, from a command line on top of ``base``; ``nodes`` are machines that the
    ranks pretend to live on, ``probe`` is told of collectives."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    config = resolve_and_validate(parse_run_config(shlex.split(base) + shlex.split(flags)), world)
    tokenizer = tokenizer_from(config.tokenizer)
    config = resolve_vocabulary(config, tokenizer.vocab_size)
    device = torch.device("cpu")
    ops = build_table(ALL_OPS, config.numerics, device, params_dtype(config))
    placement = None
    if nodes is not None:
        layout = logical_layout(config)
        placement = Placement(nodes=nodes, block=layout.block, expert_block=layout.expert_block)
    groups = create_process_groups(topology_of(config, world), device, placement)
    if probe is not None:
        groups = probe_groups(groups, probe)
    return assemble_run(config, tokenizer, ops, groups, Launch(rank=rank, world_size=world), "gloo")


def train(flags: str, steps: int, base: str = TINY) -> Trained:
    """Rank function: run ``steps`` steps."""
    run = build_here(flags, base)
    reader, consumed, metrics = run.reader(run.splits.train), 0, []
    for iteration in range(1, steps + 1):
        metrics.append(run.step.run(reader, iteration, consumed))
        consumed = metrics[-1].consumed_samples
    grads = [
        (piece.spec, piece.shard, piece.start, state.buffer.grad[piece.offset : piece.stop].clone())
        for state, piece in run.step.optimizer.counted_pieces()
    ]
    digests = {name: digest_hex(total) for name, total in run.step.optimizer.state_digests().items()}
    return Trained(steps=metrics, grads=grads, digests=digests)


def master_of(run: Run, name: str) -> torch.Tensor:
    """The master, as far as this rank holds it, of a parameter whose global name ends with ``name``; a view."""
    held = ((state, piece) for state in run.step.optimizer.states for span in state.spans for piece in span.pieces)
    state, piece = next((state, piece) for state, piece in held if piece.spec.name.endswith(name))
    return state.view(state.main_params, piece.offset, piece.stop)


def whole_gradients(ranks: list[Trained]) -> dict[str, torch.Tensor]:
    """Final gradients in global shape, put together from the pieces of all ranks; every element exactly once."""
    flat: dict[tuple[str, int], torch.Tensor] = {}
    specs: dict[str, dict[int, ParamSpec]] = {}
    for rank in ranks:
        for spec, shard, start, values in rank.grads:
            specs.setdefault(spec.name, {})[shard] = spec
            numel = next(s for s in spec.shards if s.index == shard).numel
            target = flat.setdefault((spec.name, shard), torch.full((numel,), float("nan")))
            assert target[start : start + len(values)].isnan().all(), f"{spec.name}: an element is there twice"
            target[start : start + len(values)] = values
    whole = {}
    for name, by_shard in specs.items():
        spec = next(iter(by_shard.values()))
        assert len(by_shard) == spec.num_shards, f"{name}: shards {sorted(by_shard)} of {spec.num_shards}"
        whole[name] = torch.full(spec.shape, float("nan"))
        for index, holder in by_shard.items():
            shard = next(s for s in holder.shards if s.index == index)
            offset, values = 0, flat[name, index].view(shard.shape)
            for box in shard.boxes:
                extent = box[shard.dim][1] - box[shard.dim][0]
                whole[name][tuple(slice(*edge) for edge in box)] = values.narrow(shard.dim, offset, extent)
                offset += extent
        assert not whole[name].isnan().any(), f"{name}: elements are missing"
    return whole
