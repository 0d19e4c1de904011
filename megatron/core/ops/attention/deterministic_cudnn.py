"""``attention`` by cuDNN's fused kernels through the cuDNN frontend, with its deterministic backward.

Registered everywhere; supported only where the package ``cudnn`` (nvidia-cudnn-frontend) is installed.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.attention import deterministic_torch_flash
from megatron.core.ops.attention.deterministic_torch_flash import last_dim_adjacent
from megatron.core.ops.availability import installed
from megatron.core.ops.registry import Guarantee, Variant

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a [B, N, S, D] view."""


@dataclass(frozen=True, slots=True)
class _Plan:
    graph: Any
    slots: dict[str, Any]
    workspace_bytes: int


def _layout(x: torch.Tensor) -> Layout:
    return tuple(x.shape), tuple(x.stride())


@functools.cache
def _frontend() -> ModuleType:
    return importlib.import_module("cudnn")


@functools.cache
def _handle(device_index: int) -> Any:
    with torch.cuda.device(device_index):
        return _frontend().create_handle()


def _graph(device_index: int) -> Any:
    kinds = _frontend().data_type
    return _frontend().pygraph(
        io_data_type=kinds.BFLOAT16,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=_handle(device_index),
    )


def _input(graph: Any, name: str, layout: Layout, *, fp32: bool = False) -> Any:
    kind = _frontend().data_type.FLOAT if fp32 else _frontend().data_type.BFLOAT16
    return graph.tensor(name=name, dim=list(layout[0]), stride=list(layout[1]), data_type=kind)


def _built(graph: Any, slots: dict[str, Any]) -> _Plan:
    """Heuristic A's first plan: a fixed function of shapes and versions; nothing is timed."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([_frontend().heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, slots, graph.get_workspace_size())


@functools.lru_cache(maxsize=64)
def _forward_plan(device_index: int, q: Layout, k: Layout, v: Layout, out: Layout, scale: float) -> _Plan:
    graph = _graph(device_index)
    slots = {name: _input(graph, name, layout) for name, layout in (("q", q), ("k", k), ("v", v))}
    o, stats = graph.sdpa(name="attention", **slots, generate_stats=True, attn_scale=scale, use_causal_mask=True)
    o.set_output(True).set_dim(list(out[0])).set_stride(list(out[1]))
    stats.set_output(True).set_data_type(_frontend().data_type.FLOAT)
    return _built(graph, {**slots, "o": o, "stats": stats})


@functools.lru_cache(maxsize=64)
def _backward_plan(device_index: int, layouts: tuple[Layout, ...], scale: float) -> _Plan:
    graph = _graph(device_index)
    names = ("q", "k", "v", "o", "dO")
    slots = {name: _input(graph, name, layout) for name, layout in zip(names, layouts, strict=True)}
    batch, heads, length, _ = layouts[0][0]
    stats = _input(graph, "stats", ((batch, heads, length, 1), (heads * length, length, 1, 1)), fp32=True)
    grads = graph.sdpa_backward(
        name="attention_backward",
        **slots,
        stats=stats,
        attn_scale=scale,
        use_causal_mask=True,
        use_deterministic_algorithm=True,
    )
    for grad, layout in zip(grads, layouts[:3], strict=True):
        grad.set_output(True).set_dim(list(layout[0])).set_stride(list(_packed(layout[0])))
    return _built(graph, {**slots, "stats": stats, **dict(zip(("dq", "dk", "dv"), grads, strict=True))})


def _packed(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a [B, N, S, D] view of contiguous [S, B, N, D] memory."""
    batch, heads, _, width = size
    return heads * width, width, batch * heads * width, 1


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, _packed(tuple(like.shape)), dtype=like.dtype, device=like.device)


def _execute(plan: _Plan, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    cudnn, handle = _frontend(), _handle(device.index)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=device)
    plan.graph.execute({plan.slots[name]: t for name, t in tensors.items()}, workspace, handle=handle)


class _CudnnAttention(Node):
    """Tensors are [B, N, S, D] views."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out = _new(q)
        stats = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
        plan = _forward_plan(q.device.index, _layout(q), _layout(k), _layout(v), _layout(out), scale)
        _execute(plan, {"q": q, "k": k, "v": v, "o": out, "stats": stats}, q.device)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        q, k, v, out, stats = ctx.saved_tensors
        dout = last_dim_adjacent(dout)
        plan = _backward_plan(q.device.index, tuple(_layout(x) for x in (q, k, v, out, dout)), ctx.scale)
        grads = {"dq": _new(q), "dk": _new(k), "dv": _new(v)}
        _execute(plan, {"q": q, "k": k, "v": v, "o": out, "dO": dout, "stats": stats, **grads}, q.device)
        return grads["dq"], grads["dk"], grads["dv"], None


def attention(q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Same contract as the reference, for bf16 and head widths up to 128 that are multiples of 8."""
    if not q_SBND.numel() or q_SBND.shape[0] == 1:
        # cuDNN has no backward of single positions.
        return deterministic_torch_flash.attention(q_SBND, k_SBGD, v_SBGD, scale)
    q, k, v = (last_dim_adjacent(x).permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    return _CudnnAttention.apply(q, k, v, float(scale)).permute(2, 0, 1, 3)


VARIANT = Variant(
    name="deterministic_cudnn",
    fn=attention,
    guarantee={"cuda": Guarantee.RUN_TO_RUN} if installed("cudnn") else {},
    dtypes=frozenset({torch.bfloat16}),
    why="cuDNN's deterministic backward, asked for by name; the plan is the first of a fixed heuristic.",
    sources=("megatron.core.ops.attention.deterministic_torch_flash",),
    head_widths=range(8, 129, 8),
)
