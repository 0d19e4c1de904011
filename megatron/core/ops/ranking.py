"""Which variant of an op is the fastest, as measured: a committed table, nothing is timed at run time.

Rows are keyed by op and device model and name variants, the fastest first; they come from ``tools/bench/ops.py`` at the
sizes of ``tools/bench/shapes.py``. Without a row, and behind it, the order counts in which the op lists its
variants. Only ``--op-variants fastest`` and ``op=fastest`` ask; what a run takes by itself is that order.
"""

from __future__ import annotations

from collections.abc import Mapping

RANKING: Mapping[tuple[str, str], tuple[str, ...]] = {
    # 6.84, 7.53, 7.58 and 16.2 ms, forward and backward.
    ("attention", "NVIDIA H200"): (
        "te_attention",
        "te_attention_deterministic",
        "deterministic_cudnn",
        "deterministic_torch_flash",
    ),
    # 6,144 channels: 0.192, 0.206 and 0.209 ms.
    ("causal_conv1d", "NVIDIA H200"): ("deterministic_triton", "causal_conv1d", "causal_conv1d_deterministic"),
    # 32 experts, forward: 0.96 and 1.50 ms.
    ("grouped_gemm", "NVIDIA H200"): ("deterministic_torch_grouped", "te_grouped"),
    # 32 experts and 65,536 rows: 1.18, 1.27 and 1.95 ms; the same order with 128 experts.
    ("grouped_grad", "NVIDIA H200"): ("deterministic_triton", "te_grouped", "deterministic_torch_addmm"),
    # 64 heads: 0.86, 3.67 and 2.31 ms with autotuning off; ours is the fastest at 128 and 256 heads too.
    ("ssd_scan", "NVIDIA H200"): ("deterministic_triton", "mamba_ssm_deterministic", "mamba_ssm"),
}


def fastest_first(op: str, model: str, names: list[str]) -> list[str]:
    """``names`` of variants that can run, the fastest first, on the device model ``model``."""
    row = RANKING.get((op, model), ())
    return sorted(names, key=lambda name: row.index(name) if name in row else len(row))
