"""Sizes at which ops are timed: those of one Nemotron-3-Nano layer, one micro-batch of 8,192 tokens, bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron.core.ops.adam_pieces.plan import UpdatePlan
from megatron.core.ops.adam_pieces.scalars import AdamScalars
from megatron.core.ops.digest_pieces.table import PieceAt
from megatron.core.ops.grouped_gemm.spec import ends_of

TOKENS, HIDDEN, EXPERT_WIDTH, COPIES = 8192, 2688, 1856, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One call to time.

    ``grads`` names arguments (position or keyword) that get gradients; the backward is timed with the forward if there
    are any. ``work`` is the number of floating-point operations, or else of bytes that have to move, both ways.
    """

    label: str
    args: tuple
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grads: tuple[int | str, ...] = ()
    flops: float = 0.0
    moved_bytes: float = 0.0


def _normal(*shape: int, scale: float = 1.0, fp32: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32 if fp32 else torch.bfloat16).mul_(scale)


def _row_map(tokens: int, copies: int) -> torch.Tensor:
    """Copies of each token at distinct rows, sorted by a random expert of 128 and then by token."""
    expert = torch.rand(tokens, 128, device="cuda").topk(copies, dim=1).indices.flatten()
    order = torch.sort(expert, stable=True).indices
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel(), device="cuda")
    return rows.view(tokens, copies)


def _ragged(rows: int, experts: int) -> torch.Tensor:
    """Where experts' rows end; their counts add up to ``rows``, between half and one and a half times the mean."""
    step = rows // experts
    counts = [step + (step // 2) * (1 if e % 2 else -1) * (e % 5) // 4 for e in range(experts - 1)]
    return ends_of((*counts, rows - sum(counts)), torch.device("cuda"))


def ssd_scan() -> list[Workload]:
    """Nano, Super and Ultra: 64, 128 and 256 heads."""
    out = []
    for name, heads in (("Nano", 64), ("Super", 128), ("Ultra", 256)):
        packed = _normal(1, TOKENS, heads * 64 + 2048)
        x, b, c = packed.split((heads * 64, 1024, 1024), dim=-1)
        args = (
            x.unflatten(-1, (heads, 64)),
            _normal(1, TOKENS, heads),
            torch.rand(heads, device="cuda") * 2.7,
            b.unflatten(-1, (8, 128)),
            c.unflatten(-1, (8, 128)),
            _normal(heads, fp32=True),
        )
        named = {"dt_bias_N": _normal(heads, fp32=True) - 4.0, "chunk_size": 128}
        moved = 2.0 * TOKENS * heads * 64 * 5
        out.append(
            Workload(label=name, args=args, kwargs=named, grads=(0, 1, 2, 3, 4, 5, "dt_bias_N"), moved_bytes=moved)
        )
    return out


def causal_conv1d() -> list[Workload]:
    """A slice of the Mamba projection."""
    out = []
    for channels in (6144, 18432):
        x = _normal(1, TOKENS, channels + 4160)[..., 4096 : 4096 + channels]
        args = (x, _normal(channels, 4, fp32=True), _normal(channels, fp32=True))
        moved = 10.0 * TOKENS * channels
        out.append(Workload(label=f"C{channels}", args=args, grads=(0, 1, 2), moved_bytes=moved))
    return out


def attention() -> list[Workload]:
    """Equal and grouped heads."""
    out = []
    for batch, heads, groups in ((2, 32, 32), (1, 32, 2)):
        q = _normal(TOKENS, batch, heads, 128)
        k, v = _normal(TOKENS, batch, groups, 128), _normal(TOKENS, batch, groups, 128)
        flops = 7.0 * batch * heads * 128 * TOKENS**2
        label = f"B{batch} N{heads} G{groups} S{TOKENS} D128"
        out.append(Workload(label=label, args=(q, k, v, 128**-0.5), grads=(0, 1, 2), flops=flops))
    return out


def grouped_gemm() -> list[Workload]:
    """Forward and dgrad of the experts' first layer."""
    rows, out = 65536, []
    for experts in (32, 128):
        ends = _ragged(rows, experts)
        weight = _normal(experts, EXPERT_WIDTH, HIDDEN, scale=0.02)
        flops = 2.0 * rows * HIDDEN * EXPERT_WIDTH
        args = (_normal(rows, HIDDEN), weight, ends)
        out.append(Workload(label=f"E{experts} forward", args=args, flops=flops))
        args = (_normal(rows, EXPERT_WIDTH), weight, ends)
        out.append(Workload(label=f"E{experts} dgrad", args=args, kwargs={"transposed": True}, flops=flops))
    return out


def grouped_grad() -> list[Workload]:
    """Weight gradient of the experts' first layer into fp32."""
    rows, out = 65536, []
    for experts in (32, 128):
        main = torch.zeros(experts, EXPERT_WIDTH, HIDDEN, device="cuda")
        args = (main, _normal(rows, EXPERT_WIDTH), _normal(rows, HIDDEN), _ragged(rows, experts))
        out.append(Workload(label=f"E{experts}", args=args, flops=2.0 * rows * HIDDEN * EXPERT_WIDTH))
    return out


def linear_grad() -> list[Workload]:
    """The Mamba layer's input projection."""
    main = torch.zeros(10304, HIDDEN, device="cuda")
    args = (main, _normal(TOKENS, 10304), _normal(TOKENS, HIDDEN))
    return [Workload(label="10304x2688", args=args, flops=2.0 * TOKENS * 10304 * HIDDEN)]


def norms(op: str) -> list[Workload]:
    """``rms_norm`` of the stream, ``gated_rms_norm`` of the mixer's output."""
    args: tuple
    if op == "rms_norm":
        args = (_normal(TOKENS, 1, HIDDEN), _normal(HIDDEN, fp32=True), 1e-5)
        return [Workload(label="8192x2688", args=args, grads=(0, 1), moved_bytes=10.0 * TOKENS * HIDDEN)]
    z = _normal(1, TOKENS, 10304)[..., :4096]
    args = (_normal(1, TOKENS, 4096), z, _normal(4096, fp32=True), 512, 1e-5)
    return [Workload(label="8192x4096 g512", args=args, grads=(0, 1, 2), moved_bytes=16.0 * TOKENS * 4096)]


def activation() -> list[Workload]:
    """Squared ReLU with the routing weight, over all rows of a micro-batch's experts."""
    rows = TOKENS * COPIES
    args = (_normal(rows, EXPERT_WIDTH), "squared_relu", torch.rand(rows, device="cuda"))
    return [Workload(label="49152x1856", args=args, grads=(0, 2), moved_bytes=10.0 * rows * EXPERT_WIDTH)]


def permutation(op: str) -> list[Workload]:
    """Six copies of a token; of ``moe_permute`` also their weights, one number a row."""
    rows, row_of = TOKENS * COPIES, _row_map(TOKENS, COPIES)
    args = (_normal(TOKENS, HIDDEN), row_of, rows) if op == "moe_permute" else (_normal(rows, HIDDEN), row_of)
    out = [Workload(label="8192x6x2688", args=args, grads=(0,), moved_bytes=4.0 * (rows + TOKENS) * HIDDEN)]
    if op == "moe_permute":
        args = (_normal(rows, 1, fp32=True), row_of.view(-1, 1), rows)
        out.append(Workload(label="49152x1", args=args, grads=(0,), moved_bytes=16.0 * rows))
    return out


def cross_entropy(op: str) -> list[Workload]:
    """The whole vocabulary on one rank."""
    vocabulary = 131072
    logits, target = _normal(TOKENS, vocabulary), torch.randint(vocabulary, (TOKENS,), device="cuda")
    if op == "cross_entropy_stats":
        return [Workload(label="8192x131072", args=(logits, target, vocabulary), moved_bytes=2.0 * logits.numel())]
    args = (logits, target, vocabulary, torch.full((TOKENS,), 12.3, device="cuda"), torch.rand(TOKENS, device="cuda"))
    return [Workload(label="8192x131072", args=args, moved_bytes=4.0 * logits.numel())]


def rest(op: str) -> list[Workload]:
    """Elementwise ops and the embedding's gradient."""
    args: tuple
    numel = 1 << 28
    if op == "adam_pieces":
        return [_adam_pieces(numel, digest) for digest in (False, True)]
    if op == "blocked_fold":
        args = (torch.rand(8, numel // 8, device="cuda"), 8)
        return [Workload(label="8 x 2^25", args=args, moved_bytes=4.5 * numel)]
    if op == "dropout":
        shape = (TOKENS, 1, 16384)
        args = (_normal(*shape), (1, 2), shape, tuple((0, n) for n in shape), 0.1)
        return [Workload(label="8192x16384", args=args, grads=(0,), moved_bytes=8.0 * TOKENS * 16384)]
    if op == "rope":
        args = (_normal(TOKENS, 1, 32, 128), torch.rand(TOKENS, 1, 64, device="cuda"))
        return [Workload(label="8192x32x128", args=args, grads=(0,), moved_bytes=8.0 * TOKENS * 4096)]
    main = torch.zeros(131072, HIDDEN, device="cuda")
    args = (main, _normal(TOKENS, HIDDEN), torch.randint(131072, (TOKENS,), device="cuda"))
    return [Workload(label="8192 ids", args=args, moved_bytes=10.0 * TOKENS * HIDDEN)]


def _adam_pieces(numel: int, digest: bool) -> Workload:
    """A shard of 64 equal pieces with bf16 weights."""
    length = numel // 64
    pieces = [PieceAt(name=f"p{i}", shard=0, start=0, length=length, offset=i * length) for i in range(64)]
    plan = UpdatePlan(pieces, [piece.offset for piece in pieces], [True] * 64)
    scalars = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7, clip_factor=0.5)
    streams = tuple(torch.rand(numel, device="cuda") for _ in range(4))
    args = (plan, *streams, torch.zeros(numel, dtype=torch.bfloat16, device="cuda"))
    kwargs = {"scalars": scalars, "digest": digest}
    label = "2^28, digests" if digest else "2^28"
    return Workload(label=label, args=args, kwargs=kwargs, moved_bytes=30.0 * numel)


def norm_blocks() -> list[Workload]:
    """A gradient of a billion elements."""
    return [Workload(label="2^30", args=(torch.rand(1 << 30, device="cuda"),), moved_bytes=4.0 * (1 << 30))]


def router_topk() -> list[Workload]:
    """Nano's and the proxy's routers."""
    return [
        Workload(label=f"8192x{experts} k6", args=(torch.rand(TOKENS, experts, device="cuda"), None, 6))
        for experts in (32, 128, 512)
    ]


def router_table() -> list[Workload]:
    """The proxy's and Nano's routers: marks, and gradients of scores."""
    out = []
    for experts in (32, 128, 512):
        ids = torch.rand(TOKENS, experts, device="cuda").topk(6, dim=1).indices.sort(dim=1).values
        label = f"8192x{experts} k6"
        out.append(Workload(label=f"{label} marks", args=(ids, experts)))
        out.append(Workload(label=f"{label} values", args=(ids, experts, torch.rand(TOKENS, 6, device="cuda"))))
    return out


def router_weights() -> list[Workload]:
    """The proxy's and Nano's routers."""
    out = []
    for experts in (32, 128, 512):
        score = torch.rand(TOKENS, experts, device="cuda")
        ids = score.topk(6, dim=1).indices.sort(dim=1).values
        out.append(Workload(label=f"8192x{experts} k6", args=(score, ids, True, 2.5), grads=(0,)))
    return out


def router_balance() -> list[Workload]:
    """The proxy's and Nano's routers, one sequence."""
    return [
        Workload(
            label=f"8192x{experts} k6", args=(torch.rand(TOKENS, experts, device="cuda"), 6, (1,), False), grads=(0,)
        )
        for experts in (32, 128, 512)
    ]


WORKLOADS: Mapping[str, Callable[[], list[Workload]]] = {
    "ssd_scan": ssd_scan,
    "causal_conv1d": causal_conv1d,
    "attention": attention,
    "grouped_gemm": grouped_gemm,
    "grouped_grad": grouped_grad,
    "linear_grad": linear_grad,
    "norm_blocks": norm_blocks,
    "router_topk": router_topk,
    "router_table": router_table,
    "router_weights": router_weights,
    "router_balance": router_balance,
    "activation": activation,
    **{op: partial(norms, op) for op in ("rms_norm", "gated_rms_norm")},
    **{op: partial(permutation, op) for op in ("moe_permute", "moe_unpermute")},
    **{op: partial(cross_entropy, op) for op in ("cross_entropy_stats", "cross_entropy_grad")},
    **{op: partial(rest, op) for op in ("adam_pieces", "blocked_fold")},
    **{op: partial(rest, op) for op in ("dropout", "rope", "embedding_grad")},
}
