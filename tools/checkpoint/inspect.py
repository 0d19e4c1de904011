"""Show what a checkpoint holds: how far the run had come, its layouts, every tensor; the values of chosen ones.

    python tools/checkpoint/inspect.py runs/a/checkpoints
    python tools/checkpoint/inspect.py runs/a/checkpoints/iter_0000004 --tensor main_params.decoder.final_norm.weight

A folder of checkpoints means its newest one. Nothing is written or verified; ``megatron-determinism checkpoint verify``
does that. Exit codes: 0 shown, 2 no such tensor, 3 not a checkpoint, or damaged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # This file's own folder would hide Python's module `inspect`, which torch needs.
    sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.dist_checkpointing.stored import StoredCheckpoint
from tools.command_line import run_tool

_SHOWN = 8


def summary(stored: StoredCheckpoint) -> dict[str, Any]:
    """What there is, without reading a tensor."""
    facts = stored.facts
    names = (
        "iteration",
        "consumed_train_samples",
        "consumed_valid_samples",
        "step_count",
        "schedule_position",
        "logical_layout",
        "physical_layout",
        "distributed_optimizer",
        "hybrid_layer_pattern",
        "branches",
    )
    tensors = {key: stored.tensor(key) for key in facts["tensors"]}
    return {
        "checkpoint": str(stored.folder),
        **{name: facts.get(name) for name in names},
        "bytes": sum(file["bytes"] for file in facts["files"].values()),
        "files": len(facts["files"]),
        "parameters": sum(t.numel for key, t in tensors.items() if key.startswith("main_params.")),
        "tensors": {
            key: {
                "dtype": t.dtype,
                "shape": list(t.shape),
                "shards": t.shards,
                "digest": facts["tensors"][key]["digest"],
            }
            for key, t in tensors.items()
        },
    }


def values_shown(stored: StoredCheckpoint, key: str) -> dict[str, Any]:
    """One tensor in numbers.

    Raises:
        ConfigError: there is no such tensor.
    """
    if key not in stored.facts["tensors"]:
        raise ConfigError([Problem(f"--tensor {key}", f"a tensor of {stored.folder}", "--tensor")])
    values = stored.values(key)
    return {
        "finite": bool(torch.isfinite(values).all()),
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": values.mean(dtype=torch.float64).item(),
        "first": [v.hex() if isinstance(v, float) else v for v in values[:_SHOWN].tolist()],
    }


def _print(shown: dict[str, Any]) -> None:
    tensors, chosen = shown.pop("tensors"), shown.pop("values")
    for name, value in shown.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name + ' ':.<26} {text}")
    kinds = Counter(key.split(".", 1)[0] for key in tensors)
    print(f"{'tensors ':.<26} {len(tensors)} ({', '.join(f'{kind} {count}' for kind, count in kinds.items())})")
    for key, facts in tensors.items():
        print(
            f"  {facts['digest'][:8]} {facts['dtype']:>8} {str(facts['shape']):<18} {facts['shards']:>4} shards  {key}"
        )
    for key, numbers in chosen.items():
        print(f"{key}: {', '.join(f'{name} {value}' for name, value in numbers.items())}")


def main(argv: Sequence[str]) -> int:
    """Show one checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("--tensor", nargs="+", default=[], metavar="KEY", help="show the values of these tensors")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    stored = StoredCheckpoint(options.folder)
    shown = {**summary(stored), "values": {key: values_shown(stored, key) for key in options.tensor}}
    if options.json:
        print(json.dumps(shown))
    else:
        _print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
