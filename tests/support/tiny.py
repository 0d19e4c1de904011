"""TINY: the small hybrid model of the layout tests, its batches, and gradients gathered to global shapes.

``tiny_gradients`` is a whole step without an engine: zeroed fp32 main gradients, forward and backward of this rank's
micro-batches, sums over ranks as the definition of a gradient has them, shards put back into global tensors. It
returns the same dictionary on every rank, so that any layout can be compared with one rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Batch, Microbatch
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.contracts.parameter import ModelParameter
from megatron.core.models.hybrid.hybrid_model import HybridChunk, build_hybrid_chunks
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import build_table
from megatron.core.process_groups.collectives import gather_objects
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.topology import LogicalLayout, default_block
from megatron.core.tensor_parallel.context import ModelContext
from tests.support.ranks import groups_for_test, ordered_sums

PATTERN = "ME*EM-"
VOCAB_SIZE = 512
SEQ_LENGTH = 64
SEED = 1234
CPU = torch.device("cpu")


def tiny_config(**changes: Any) -> TransformerConfig:
    """TINY, resolved; keyword arguments replace fields."""
    values: dict[str, Any] = {
        "hybrid_layer_pattern": PATTERN,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "seq_length": SEQ_LENGTH,
        "max_position_embeddings": SEQ_LENGTH,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "squared_relu": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "attention_dropout": 0.0,
        "position_embedding_type": "none",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_state_dim": 16,
        "mamba_num_groups": 2,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": ("seq_aux_loss",),
        "moe_aux_loss_coeff": (1e-2,),
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 128,
        "init_method_std": 0.1,
    }
    values.update(changes)
    main, *parts = values["hybrid_layer_pattern"].split("/")
    values.setdefault("num_layers", sum(c != "|" for c in main))
    values.setdefault("mtp_num_layers", len(parts) or None)
    return TransformerConfig(**values)


def tiny_context(
    groups: ProcessGroups,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    padded_vocab_size: int = VOCAB_SIZE,
    ldp: int | None = None,
    micro_batch_size: int = 1,
) -> ModelContext:
    """Context over these groups with the ops of deterministic mode."""
    at = groups.topology
    ldp = ldp or at.dp
    device = CPU if groups.device.type == "meta" else groups.device
    return ModelContext(
        groups=groups,
        sums=ordered_sums(),
        ops=build_table(ALL_OPS, NumericsConfig(deterministic_mode=True), device, dtype),
        seed=SEED,
        params_dtype=dtype,
        sequence_parallel=sequence_parallel,
        layout=LogicalLayout(
            ldp=ldp,
            block=default_block(ldp, at.tp),
            tp=at.tp,
            ep=at.ep,
            etp=at.etp,
            padded_vocab_size=padded_vocab_size,
            micro_batch_size=micro_batch_size,
        ),
    )


def tiny_batch(
    shard: int,
    index: int,
    *,
    size: int = 1,
    seq_length: int = SEQ_LENGTH,
    vocab_size: int = VOCAB_SIZE,
    device: torch.device = CPU,
) -> Batch:
    """Tokens of one logical micro-batch; every fifth position of the first sequence is masked out of the loss."""
    generator = torch.Generator().manual_seed(7919 * (shard + 1) + index)
    text = torch.randint(0, vocab_size, (size, seq_length + 1), generator=generator).to(device)
    mask = torch.ones(size, seq_length, device=device)
    mask[0, ::5] = 0.0
    return Batch(
        tokens_BS=text[:, :-1].contiguous(),
        labels_BS=text[:, 1:].contiguous(),
        loss_mask_BS=mask,
        position_ids_BS=torch.arange(seq_length, device=device).expand(size, -1).contiguous(),
    )


def attach_main_grads(chunks: list[HybridChunk]) -> list[ModelParameter]:
    """Give every parameter zeroed fp32 main gradients, as an engine would; the parameters in order."""
    params = list({id(p): p for chunk in chunks for p in chunk.model_parameters()}.values())
    for param in params:
        param.main_grads = tuple(
            torch.zeros(param.shape, dtype=torch.float32, device=param.device) for _ in param.spec.stages or ("",)
        )
    return params


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks share what; the world is ``tp * dp``."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return "-".join(f"{name}{value}" for name, value in shown.items() if value not in (1, None, False)) or "one"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What ``tiny_gradients`` saw: losses and reports by (shard, micro-batch), gradients by parameter name, and the
    values this rank held of parameters that all tensor-parallel ranks hold."""

    losses: dict[tuple[int, int], tuple[float, int]]
    aux: dict[tuple[int, int], dict[tuple[str, int], float]]
    token_counts: dict[str, list[int]]
    grads: dict[str, torch.Tensor]
    own_grads: dict[str, torch.Tensor]


def put_shards(spec: ParamSpec, local: torch.Tensor, whole: torch.Tensor) -> None:
    """Add a rank's tensor into the global one, box by box."""
    for place, shard in enumerate(spec.shards):
        piece = local[place : place + 1] if spec.expert else local
        offset = 0
        for box in shard.boxes:
            extent = box[shard.dim][1] - box[shard.dim][0]
            whole[tuple(slice(*edge) for edge in box)] += piece.narrow(shard.dim, offset, extent)
            offset += extent


def gather_whole(groups: ProcessGroups, params: list[ModelParameter]) -> dict[str, torch.Tensor]:
    """Main gradients in global shape, added over the ranks as the definition of a gradient says; on every rank.

    Copies that are complete on every tensor-parallel rank count once: those of rank 0.
    """
    mine = [(p.spec, p.main_grads) for p in params]
    whole: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(gather_objects(groups.world, mine)):
        for spec, buffers in theirs:
            total = whole.setdefault(spec.name, torch.zeros(spec.shape))
            copy = spec.tp_replicated and not spec.tp_partial and groups.topology.coordinates(rank).tp > 0
            if not copy:
                put_shards(spec, sum(buffers[1:], buffers[0]), total)
    return whole


def run_microbatches(
    chunks: list[HybridChunk], coordinates: list[tuple[int, int]], num_microbatches: int, size: int, iteration: int = 1
) -> tuple[dict, dict]:
    """Forward and backward of these (shard, micro-batch) pairs through all chunks of one rank."""
    losses, aux = {}, {}
    for shard, index in coordinates:
        batch = tiny_batch(
            shard,
            index,
            size=size,
            seq_length=chunks[0].config.seq_length,
            vocab_size=chunks[0].vocab_size,
            device=chunks[0].context.groups.device,
        )
        microbatch = Microbatch(iteration=iteration, shard=shard, index=index, num_microbatches=num_microbatches)
        activation, layers = None, {}
        for chunk in chunks:
            activation, report = chunk(batch, activation, microbatch)
            for name, values in report.per_layer.items():
                layers.update({(name, layer): value.item() for layer, value in values.items()})
        activation.backward()
        losses[shard, index] = (report.loss_sum.item(), report.num_tokens.item())
        aux[shard, index] = layers
    return losses, aux


def tiny_gradients(
    layout: Layout, shards: int, changes: dict[str, Any] | None = None, num_microbatches: int = 1, size: int = 1
) -> Step:
    """One step of a model under ``layout``: rank function for ``run_ranks(layout.world, ...)``.

    ``shards`` logical shards are spread over the data-parallel ranks.
    """
    groups = groups_for_test(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    context = tiny_context(groups, sequence_parallel=layout.sequence_parallel, ldp=shards)
    chunks = build_hybrid_chunks(tiny_config(**(changes or {})), context, VOCAB_SIZE)
    params = attach_main_grads(chunks)
    mine = [(v, m) for v in range(groups.dp.rank, shards, groups.dp.size) for m in range(num_microbatches)]
    losses, aux = run_microbatches(chunks, mine, num_microbatches, size)
    routers = [r for chunk in chunks for r in chunk.balanced_routers()]
    return Step(
        losses=losses,
        aux=aux,
        token_counts={r.name: r.token_counts_E.tolist() for r in routers},
        grads=gather_whole(groups, params),
        own_grads={p.spec.name: p.main_grads[0] for p in params if p.spec.tp_replicated},
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the wanted tensor."""
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
