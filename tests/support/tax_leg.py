"""A stand-in for a training command, in plain Python: writes what a run writes, with step times that its kind says.

python tests/support/tax_leg.py KIND FLAGS...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FAST_OPS = {"attention": "fast_cudnn", "ssd_scan": "deterministic_triton", "rms_norm": "fast"}
OPS = {"attention": "deterministic_cudnn", "ssd_scan": "deterministic_triton", "rms_norm": "deterministic"}
SLOWER = {"steady": 1.01, "slow": 1.5, "noisy": 1.0, "gpu": 1.1, "deaf": 1.0, "drifts": 1.0}


def last(words: list[str], flag: str) -> str:
    """The word behind the last ``flag``; empty where there is none."""
    at = [i for i, word in enumerate(words) if word == flag]
    return words[at[-1] + 1] if at else ""


def main(kind: str, words: list[str]) -> str | None:
    """One leg; the reason where it fails."""
    switch = [word for word in words if word in ("--deterministic-mode", "--no-deterministic-mode")][-1]
    strict = switch == "--deterministic-mode" or kind == "deaf"
    variants = last(words, "--op-variants")
    folder = Path(last(words, "--run-dir"))
    if kind == "fails" and folder.parent.name == "deterministic_2":
        return "out of luck"
    if kind == "gpu" and variants == "rms_norm=fast":
        return "refused under deterministic algorithms"
    folder.mkdir(parents=True)
    number = int(folder.parent.name.rpartition("_")[2]) if folder.parent.name[-1].isdigit() else 0
    step_s = 0.2 * (SLOWER.get(kind, 1.0) if strict else 1.0)
    if kind == "noisy" and strict:
        step_s *= (0.9, 1.1)[number % 2]
    if variants == "attention=fast_cudnn":
        step_s *= 0.95
    loss = 3.0 + (number if kind == "drifts" and strict else 0)
    iterations = 1 if kind == "short" else int(last(words, "--exit-interval") or 9)
    records = [
        {"kind": "train", "iteration": i, "elapsed_s": step_s * (50 if i <= 3 else 1), "losses": {"lm loss": loss / i}}
        for i in range(1, iterations + 1)
    ]
    records.insert(4, {"kind": "valid", "iteration": 4, "losses": {"lm loss": 1.0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = FAST_OPS if variants == "fastest" else OPS
    manifest = {
        "trajectory": {"ops": {op: {"variant": variant} for op, variant in chosen.items()}},
        "launch": {
            "world_size": 2 if kind == "gpu" else 1,
            "argv": words,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "port": os.environ.get("PET_MASTER_PORT"),
            "switches": {
                "deterministic_algorithms": strict,
                "fill_uninitialized_memory": not strict,
                "cudnn_benchmark": False,
            },
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if "--profile" in words and kind != "unprofiled":
        write_profiles(folder, kind, step_s, strict)
    return None


def write_profiles(folder: Path, kind: str, step_s: float, strict: bool) -> None:
    """What the profiled ranks leave."""
    for rank in range(2 if kind == "gpu" else 1):
        busy = step_s * 0.75
        gpu = {
            "busy_s": busy,
            "communication_s": 0.02,
            "exposed_communication_s": 0.01 * rank,
            "launches": 1000.0,
            "groups": {
                "gemm": {"seconds": 0.1, "launches": 600.0},
                "attention": {"seconds": busy - 0.1, "launches": 400.0},
            },
            "kernels": [{"name": "k", "group": "gemm", "seconds": 0.1, "launches": 600.0}],
        }
        on_gpu = kind == "gpu"
        facts = {
            "rank": rank,
            "iterations": [4, 5, 6],
            "wall_s": step_s * 1.3,
            "device": "GPU 1" if on_gpu else "cpu",
            "peak_memory_bytes": (5 + strict) * 10**9 + rank if on_gpu else None,
            "peak_host_memory_bytes": 10**9,
            "gpu": gpu if on_gpu else None,
        }
        (folder / f"profile_rank_{rank:05d}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
