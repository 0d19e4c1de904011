"""What a GPU did in a window of time: busy and idle, communication that nothing hides, kernels by group.

Works on intervals of kernels, copies and fills; free of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OPS_FOLDER = Path(__file__).resolve().parents[2] / "core" / "ops"
COMMUNICATION, OTHER = "communication", "other"
TOP_KERNELS = 40

OP_GROUPS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("grouped_gemm", "grouped_grad", "linear_grad"),
    "attention": ("attention", "attention_dropout"),
    "ssd": ("ssd_scan",),
    "conv1d": ("causal_conv1d",),
    "moe": ("moe_permute", "moe_unpermute", "router_balance", "router_table", "router_topk", "router_weights"),
    "cross entropy": ("cross_entropy_stats", "cross_entropy_grad"),
    "norm": ("rms_norm", "layer_norm", "gated_rms_norm"),
    "optimizer": ("adam_pieces", "sgd_step", "norm_blocks", "digest_pieces"),
    "ordered sum": ("blocked_fold",),
}
"""Ops by group; kernels of other ops are elementwise."""

PATTERNS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn::fusion::matmul_dq"),
    ("ssd", r"chunk_scan|chunk_state|chunk_cumsum|bmm_chunk|state_passing|ssd"),
    ("conv1d", r"conv1d"),
    ("cross entropy", r"cross_entropy|softmax|nll_loss"),
    ("gemm", r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv"),
    ("moe", r"permute|moe|sort|radix|topk|histogram|index_put|indexing|scatter|gather"),
    ("norm", r"norm"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("copy, fill", r"memcpy|memset|fill|copy|catarray"),
    ("elementwise, reduce", r"elementwise|reduce|scan|triton|vectorized"),
)
"""Kernels that are not ours, by the first pattern found in the name."""


class Interval(NamedTuple):
    """One kernel, copy or fill, in microseconds."""

    name: str
    start: float
    end: float


def own_kernels(folder: Path = OPS_FOLDER) -> dict[str, str]:
    """Names of the Triton functions of the ops under ``folder``, and the group of each."""
    groups = {op: group for group, ops in OP_GROUPS.items() for op in ops}
    found = {}
    for path in sorted(folder.rglob("*.py")):
        op = path.relative_to(folder).parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = groups.get(op, "elementwise, reduce")
    return found


def group_of(kernel: str, own: Mapping[str, str]) -> str:
    """The group of a kernel by its name."""
    if kernel in own:
        return own[kernel]
    lowered = kernel.lower()
    return next((group for group, pattern in PATTERNS if re.search(pattern, lowered)), OTHER)


def intervals_of(trace: Mapping[str, Any]) -> list[Interval]:
    """What ran on the GPU, from a profiler's trace in Chrome's format."""
    categories = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        Interval(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in categories
    ]


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals, in microseconds."""
    total, reached = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start):
        total += max(0.0, interval.end - max(interval.start, reached))
        reached = max(reached, interval.end)
    return total


def summary(intervals: Sequence[Interval], steps: int, own: Mapping[str, str]) -> dict[str, Any]:
    """Per step, in seconds: time the GPU was busy, communication, the part of it during which nothing else ran, the
    number of launches, and seconds and launches by group and of the longest kernels."""
    kernels: dict[str, dict[str, Any]] = {}
    for interval in intervals:
        known = kernels.setdefault(
            interval.name, {"group": group_of(interval.name, own), "seconds": 0.0, "launches": 0}
        )
        known["seconds"] += (interval.end - interval.start) / 1e6 / steps
        known["launches"] += 1 / steps
    groups: dict[str, dict[str, float]] = {}
    for facts in kernels.values():
        group = groups.setdefault(facts["group"], {"seconds": 0.0, "launches": 0.0})
        group["seconds"] += facts["seconds"]
        group["launches"] += facts["launches"]
    busy = covered(intervals)
    talking = [i for i in intervals if kernels[i.name]["group"] == COMMUNICATION]
    working = covered(i for i in intervals if kernels[i.name]["group"] != COMMUNICATION)
    longest = sorted(kernels.items(), key=lambda item: -item[1]["seconds"])[:TOP_KERNELS]
    return {
        "busy_s": busy / 1e6 / steps,
        "communication_s": covered(talking) / 1e6 / steps,
        "exposed_communication_s": (busy - working) / 1e6 / steps,
        "launches": len(intervals) / steps,
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1]["seconds"])),
        "kernels": [{"name": name, **facts} for name, facts in longest],
    }
