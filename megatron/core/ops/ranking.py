"""Which variant of an op is the fastest, as measured: a committed table, nothing is timed at run time.

Rows are keyed by op and device model and name variants, the fastest first; they come from ``tools/bench/ops.py`` at the
sizes of ``tools/bench/shapes.py``. Without a row, and behind it, the order counts in which the op lists its
variants. Only ``--op-variants fastest`` and ``op=fastest`` ask; what a run takes by itself is that order.
"""

from __future__ import annotations

from collections.abc import Mapping

RANKING: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("attention", "NVIDIA H200"): ("deterministic_cudnn", "deterministic_torch_flash"),
    # 32 experts and 65,536 rows; with 128 experts the order is the other way round.
    ("grouped_grad", "NVIDIA H200"): ("deterministic_torch_addmm", "deterministic_triton"),
}


def fastest_first(op: str, model: str, names: list[str]) -> list[str]:
    """``names`` of variants that can run, the fastest first, on the device model ``model``."""
    row = RANKING.get((op, model), ())
    return sorted(names, key=lambda name: row.index(name) if name in row else len(row))
