"""Small Stages for tests of the engine: parameters of every kind with made-up gradients, and a tiny trainable stack."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import one_hot

from megatron.core.config.numerics import NumericsConfig
from megatron.core.config.optimizer import DistributedDataParallelConfig, OptimizerConfig
from megatron.core.contracts.batch import Batch, Microbatch, StageReport
from megatron.core.contracts.param_spec import (
    Initial,
    LogicalShard,
    ParamSpec,
    cut_shard,
    expert_shard,
    replicated_shard,
)
from megatron.core.contracts.parameter import ModelParameter, accumulate_grad, use_in_fp32
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.ops import adam_pieces, blocked_fold, digest_pieces, norm_blocks
from megatron.core.ops.registry import OpTable, build_table
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.topology import LogicalLayout
from megatron.core.rng.initial_values import draw_parameter
from tests.support.ranks import ordered_sums

SEED = 4321
NORMAL = Initial(kind="normal", a=0.05)
DEFAULT_BUCKETS = DistributedDataParallelConfig()


def op_table() -> OpTable:
    """The ops the engine uses, on the CPU."""
    ops = (adam_pieces.OP, blocked_fold.OP, digest_pieces.OP, norm_blocks.OP)
    return build_table(ops, NumericsConfig(deterministic_mode=True), torch.device("cpu"), torch.float32)


def make_parameter(spec: ParamSpec, dtype: torch.dtype = torch.float32) -> ModelParameter:
    """A parameter that holds the cast of its initial values."""
    drawn = torch.empty(spec.local_shape)
    draw_parameter(spec, SEED, drawn)
    return ModelParameter(drawn.to(torch.float32 if spec.fp32 else dtype), spec)


def toy_layout(groups: ProcessGroups, block: int | None = None) -> LogicalLayout:
    """The logical layout that is the physical one."""
    return LogicalLayout(
        ldp=groups.dp.size,
        block=block or groups.dp.size,
        tp=groups.tp.size,
        ep=groups.ep.size,
        etp=groups.etp.size,
        padded_vocab_size=1,
        micro_batch_size=1,
    )


def build_engine(
    chunks: list,
    groups: ProcessGroups,
    *,
    block: int | None = None,
    ddp: DistributedDataParallelConfig = DEFAULT_BUCKETS,
    **settings: object,
) -> tuple[DistributedDataParallel, Optimizer]:
    """Gradient buffers and optimizer of some chunks."""
    parallel = DistributedDataParallel(
        chunks, ddp, groups=groups, sums=ordered_sums(), layout=toy_layout(groups, block)
    )
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, **settings)
    return parallel, Optimizer(parallel.buffers, config, groups=groups, ops=op_table(), seed=SEED)


def stage_specs(groups: ProcessGroups, hidden: int = 9) -> list[ParamSpec]:
    """Parameters of every kind on this rank; names and global shapes are the same on every layout. Two pipeline
    stages share them out, both holding the first."""
    tp, size, etp, ep = groups.tp.rank, groups.tp.size, groups.etp, groups.ep
    local = range(8 // ep.size * ep.rank, 8 // ep.size * (ep.rank + 1))

    def cut(name: str, shape: tuple[int, ...], parts: tuple[int, ...] | None = None, **facts: object) -> ParamSpec:
        shard = cut_shard(shape, 0, tp, size, parts)
        return ParamSpec(name=name, shape=shape, num_shards=size, shards=(shard,), initial=NORMAL, **facts)

    def copied(name: str, shape: tuple[int, ...], **facts: object) -> ParamSpec:
        shards = (replicated_shard(shape),)
        return ParamSpec(
            name=name, shape=shape, num_shards=1, shards=shards, initial=NORMAL, tp_replicated=True, **facts
        )

    fc1 = (8, 20, 11 * hidden)
    first = [
        cut("norm.weight", (4 * hidden,), weight_decay=False),
        cut("large.weight", (400, hidden)),
        copied("router.weight", (8, hidden), tp_partial=True),
    ]
    last = [
        cut("in_proj.weight", (48, hidden), parts=(16, 32)),
        copied("final_norm.weight", (hidden,), tp_partial=True, weight_decay=False),
        copied("full.weight", (hidden, 3)),
        cut("A_log", (8,), fp32=True, weight_decay=False),
        ParamSpec(
            name="experts.fc1.weight",
            shape=fc1,
            num_shards=8 * etp.size,
            shards=tuple(expert_shard(fc1, e, 1, etp.rank, etp.size) for e in local),
            initial=NORMAL,
            expert=True,
        ),
    ]
    specs = [cut("embedding.weight", (40, hidden), stages=("first", "last"))]
    return specs + (first if groups.pp.is_first else []) + (last if groups.pp.is_last else [])


def cut_out(whole: torch.Tensor, shard: LogicalShard) -> torch.Tensor:
    """The logical shard of a global tensor."""
    return torch.cat([whole[tuple(slice(a, b) for a, b in box)] for box in shard.boxes], dim=shard.dim)


def local_part(whole: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """What a rank with this spec holds of a global tensor."""
    return torch.cat([cut_out(whole, shard) for shard in spec.shards], dim=0).view(spec.local_shape)


def whole_gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """A made-up global gradient of multiples of 8, so that sums and halves of it are exact in any order."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randint(-50, 50, shape, generator=generator).float() * 8


class SpecStage:
    """A Stage that is nothing but parameters; tests write the gradients."""

    is_first = is_last = True

    def __init__(self, specs: list[ParamSpec], dtype: torch.dtype = torch.float32, routers: tuple = ()) -> None:
        self.params = [make_parameter(spec, dtype) for spec in specs]
        self.routers = routers

    def model_parameters(self) -> Iterator[ModelParameter]:
        """As ``Stage.model_parameters``."""
        yield from self.params

    def balanced_routers(self) -> Iterator:
        """As ``Stage.balanced_routers``."""
        yield from self.routers

    def add_exact_gradients(self, groups: ProcessGroups, step: int) -> None:
        """This rank's share of ``whole_gradient``, so that the final gradient is exactly that on every layout of a
        power of two: each data-parallel rank holds it whole, copies hold equal parts, an expert's ranks what LDP
        shards would have brought, the two ends of the pipeline a half each."""
        for param in self.params:
            spec = param.spec
            mine = local_part(whole_gradient(spec.name, spec.shape, step), spec)
            if spec.tp_partial:
                mine = mine / groups.tp.size
            if spec.expert:
                mine = mine * groups.dp.size / groups.edp.size
            if spec.stages:
                mine = mine / 2
            for main_grad in param.main_grads[: 2 if groups.pp.size == 1 else 1]:
                main_grad.add_(mine)


class _UseAtStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param: ModelParameter, stage: str) -> torch.Tensor:
        ctx.param, ctx.stage = param, stage
        return param.detach().to(torch.float32, copy=True)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return accumulate_grad(ctx.param, grad, ctx.stage), None


class ToyStage:
    """Some of ``layers`` residual tanh layers; the first stage looks tokens up in the embedding, the last one uses the
    same embedding as head and computes the loss."""

    hidden, vocab, layers = 24, 50, 8
    boundary_dtype = torch.float32

    def __init__(self, segment: int, segments: int, embedding: ModelParameter) -> None:
        self.is_first, self.is_last = segment == 0, segment == segments - 1
        self.embedding = embedding
        per = self.layers // segments
        self.mine = range(segment * per, (segment + 1) * per)
        self.weights = {i: make_parameter(self._spec(f"layers.{i}.weight", 2)) for i in self.mine}
        self.biases = {i: make_parameter(self._spec(f"layers.{i}.bias", 1)) for i in self.mine}

    @classmethod
    def _spec(cls, name: str, dims: int) -> ParamSpec:
        shape = (cls.hidden,) * dims
        return ParamSpec(name=name, shape=shape, num_shards=1, shards=(replicated_shard(shape),), initial=NORMAL)

    @classmethod
    def build_chunks(cls, groups: ProcessGroups, vpp: int) -> list[ToyStage]:
        """This rank's chunks, in order of virtual stage."""
        shape = (cls.vocab, cls.hidden)
        spec = ParamSpec(
            name="embedding.weight",
            shape=shape,
            num_shards=1,
            shards=(replicated_shard(shape),),
            initial=NORMAL,
            stages=("first", "last"),
        )
        embedding = make_parameter(spec)
        return [cls(chunk * groups.pp.size + groups.pp.rank, groups.pp.size * vpp, embedding) for chunk in range(vpp)]

    def forward(
        self, batch: Batch, activation: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, StageReport]:
        """As ``Stage.forward``."""
        report = StageReport()
        if self.is_first:
            rows = one_hot(batch.tokens_BS.T, self.vocab).float()
            activation = rows @ _UseAtStage.apply(self.embedding, "first")
        assert activation is not None
        for i in self.mine:
            report.add_layer_value("mean", i, activation.detach().mean())
            inner = activation @ use_in_fp32(self.weights[i]).T + use_in_fp32(self.biases[i])
            activation = activation + torch.tanh(inner)
        if not self.is_last:
            return activation, report
        logits = activation @ _UseAtStage.apply(self.embedding, "last").T
        losses = logits.logsumexp(-1) - logits.gather(-1, batch.labels_BS.T.unsqueeze(-1)).squeeze(-1)
        report.loss_sum = (losses * batch.loss_mask_BS.T).sum()
        report.num_tokens = batch.loss_mask_BS.sum().to(torch.int64)
        loss = report.loss_sum / report.num_tokens / microbatch.num_microbatches
        report.loss_sum = report.loss_sum.detach()
        return loss, report

    def boundary_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        """As ``Stage.boundary_shape``."""
        return (seq_length, micro_batch_size, self.hidden)

    def model_parameters(self) -> Iterator[ModelParameter]:
        """As ``Stage.model_parameters``."""
        if self.is_first or self.is_last:
            yield self.embedding
        for i in self.mine:
            yield self.weights[i]
            yield self.biases[i]

    def balanced_routers(self) -> Iterator:
        """As ``Stage.balanced_routers``."""
        yield from ()


def toy_batch(index: int, micro_batch_size: int = 2, seq_length: int = 7) -> Batch:
    """Micro-batch ``index``: made-up tokens, one position masked."""
    generator = torch.Generator().manual_seed(77 + index)
    tokens = torch.randint(0, ToyStage.vocab, (micro_batch_size, seq_length + 1), generator=generator)
    mask = torch.ones(micro_batch_size, seq_length)
    mask[0, index % seq_length] = 0.0
    return Batch(
        tokens_BS=tokens[:, :-1],
        labels_BS=tokens[:, 1:],
        loss_mask_BS=mask,
        position_ids_BS=torch.arange(seq_length).expand(micro_batch_size, -1),
    )
