"""Which variant of an op is the fastest, as measured: a committed table, nothing is timed at run time.

Rows are keyed by op and device model and name variants, the fastest first; they come from ``tools/bench/ops.py`` at the
sizes of ``tools/bench/shapes.py``. Without a row, and behind it, the order counts in which the op lists its
variants. Only ``--op-variants fastest`` and ``op=fastest`` ask; what a run takes by itself is that order.
"""

from __future__ import annotations

from collections.abc import Mapping

RANKING: Mapping[tuple[str, str], tuple[str, ...]] = {
    # 7.35, 7.37, 7.49 and 16.1 ms, forward and backward.
    ("attention", "NVIDIA H200"): (
        "deterministic_cudnn",
        "te_attention_deterministic",
        "te_attention",
        "deterministic_torch_flash",
    ),
    # 6,144 channels: 0.19, 0.45 and 0.61 ms; at 18,432 the packages' order is the other way round.
    ("causal_conv1d", "NVIDIA H200"): ("deterministic_triton", "causal_conv1d", "causal_conv1d_deterministic"),
    # 32 experts: 653 to 680 TFLOP/s, and 527 over Transformer Engine's forward and backward.
    ("grouped_gemm", "NVIDIA H200"): ("deterministic_torch_grouped", "te_grouped"),
    # 32 experts and 65,536 rows; with 128 experts the order is the other way round.
    ("grouped_grad", "NVIDIA H200"): ("deterministic_torch_addmm", "deterministic_triton"),
    # 64 heads: 1.25, 3.67 and 4.68 ms; ours is the fastest at 128 and 256 heads too.
    ("ssd_scan", "NVIDIA H200"): ("deterministic_triton", "mamba_ssm", "mamba_ssm_deterministic"),
}


def fastest_first(op: str, model: str, names: list[str]) -> list[str]:
    """``names`` of variants that can run, the fastest first, on the device model ``model``."""
    row = RANKING.get((op, model), ())
    return sorted(names, key=lambda name: row.index(name) if name in row else len(row))
