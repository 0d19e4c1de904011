"""Times the CUDA variants of ops at the sizes of tools/bench/shapes.py, after checking them.

    python -m tools.bench.ops --op ssd_scan --op rms_norm
    python -m tools.bench.ops --op all --variant deterministic_triton --json times.json

A variant whose conformance is red is not timed, and the command then exits with 1. Deterministic algorithms are on, so
CUBLAS_WORKSPACE_CONFIG has to be set. Prints, per variant and shape, the median of the forward, of forward and
backward, the rate of the latter (of the former without gradients), and whether 5 replays had the same bits.

Where bytes set the pace, two yardsticks of the same run stand beside the rate. ``copy ms`` is what one device copy
takes that moves, read and written, as many bytes as the op has to: one launch, of this size. ``of copy`` is its share
of the op's time; ``of large`` is the op's rate over that of a copy of 2 GiB, which small copies do not reach either.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Op, Variant
from tools.bench.ended import run_to_end
from tools.bench.shapes import WORKLOADS, Workload
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, REPEATS, REPLAYS = 3, 15, 5
QUEUE_CYCLES = 3_000_000
"""The GPU waits that long before a timed run, so that its launches are queued and host time is not measured."""
LARGE_COPY_BYTES = 4.0 * 2**30
"""Read and written by the copy that gives the device's rate."""
COLUMNS = ("op", "variant", "shape", "fwd ms", "fwd+bwd ms", "rate", "copy ms", "of copy", "of large", "replays")
WIDTHS = (20, 28, 26, 9, 11, 14, 9, 8, 9, 9)


def median_ms(run: Callable[[], object]) -> float:
    """Median over CUDA events of single runs, after a warm-up."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def selected(ops: list[str], names: list[str] | None) -> list[tuple[Op, Variant]]:
    """Variants to time: of these ops (or ``all``), of these names, or all but the reference and outside packages, whose
    mode a process has once (``tools/bench/outside.py``)."""
    return [
        (op, variant)
        for op in ALL_OPS
        if op.spec.name in WORKLOADS and {"all", op.spec.name} & set(ops)
        for variant in op.variants
        if (variant.name in names if names else variant is not op.variants[-1] and variant.outside is None)
        if "cuda" in variant.guarantee and torch.bfloat16 in variant.dtypes
    ]


def red(wanted: list[tuple[Op, Variant]]) -> tuple[set[str], str]:
    """Test ids of variants whose conformance in bf16 on the GPU is red (all, if the tests did not run); a report."""
    ids = [test_id(op, variant) for op, variant in wanted]
    command = [sys.executable, "-m", "pytest", "tests/ops", "-m", "gpu", "-q", "-rfE", "-k", " or ".join(ids)]
    done = run_to_end(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1):
        return set(ids), done.stdout
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {i for i in ids if any(i in failure for failure in failures)}, "\n".join(failures)


def test_id(op: Op, variant: Variant) -> str:
    """How the conformance tests name a variant in bf16 on CUDA."""
    return f"[{op.spec.name}-{variant.name}-bfloat16-cuda]"


def runs(variant: Variant, work: Workload) -> tuple[Callable[[], tuple], Callable[[], tuple] | None]:
    """The forward, and forward with backward where the workload has gradients."""
    values: dict[int | str, Any] = dict(enumerate(work.args))
    values.update(work.kwargs)
    leaves = {at: values[at].detach().requires_grad_(True) for at in work.grads}
    values |= leaves
    args = tuple(values[i] for i in range(len(work.args)))
    kwargs = {name: values[name] for name in work.kwargs}

    def forward() -> tuple:
        out = variant.fn(*args, **kwargs)
        return out if isinstance(out, tuple) else (out,)

    if not leaves:
        return forward, None
    cotangent = torch.randn_like(forward()[0])

    def both() -> tuple:
        out, *rest = forward()
        return (out, *rest, *torch.autograd.grad(out, list(leaves.values()), cotangent))

    return forward, both


def written_arguments(work: Workload) -> list[torch.Tensor]:
    """The arguments that the op may change in place."""
    return [t for t in work.args if isinstance(t, torch.Tensor) and t.is_floating_point() and not work.grads]


def outcomes(work: Workload, run: Callable[[], tuple]) -> Iterator[list[torch.Tensor]]:
    """Results, gradients and arguments changed in place, of replays that start from the same arguments."""
    written = written_arguments(work)
    before = [t.clone() for t in written]
    for _ in range(REPLAYS):
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        yield [t.detach() for t in (*run(), *written) if t is not None]


def replays_agree(variant: Variant, work: Workload, run: Callable[[], tuple]) -> bool:
    """Whether every replay had the same bits."""
    replays = outcomes(work, run)
    first = [t.clone() for t in next(replays)]
    return all(same_bits(a, b) for found in replays for a, b in zip(first, found, strict=True))


def copy_run(moved_bytes: float, device: torch.device) -> Callable[[], torch.Tensor]:
    """A device copy that reads and writes ``moved_bytes`` in all, half of them each."""
    source = torch.ones(int(moved_bytes) // 2, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def yardsticks(moved_bytes: float, ms: float, large_ms: float) -> dict[str, object]:
    """What a copy of as many bytes takes, the op's share of its pace, and of that of a large copy."""
    if not moved_bytes:
        return {"copy ms": "", "of copy": "", "of large": ""}
    copy_ms = median_ms(copy_run(moved_bytes, torch.device("cuda")))
    large = (moved_bytes / ms) / (LARGE_COPY_BYTES / large_ms)
    return {"copy ms": f"{copy_ms:.3f}", "of copy": f"{copy_ms / ms:.0%}", "of large": f"{large:.0%}"}


def measured(op: Op, variant: Variant, large_ms: float) -> Iterator[dict[str, object]]:
    """One row per workload; ``large_ms`` is what a copy of ``LARGE_COPY_BYTES`` takes."""
    for work in WORKLOADS[op.spec.name]():
        forward, both = runs(variant, work)
        with torch.enable_grad():
            forward_ms = median_ms(forward)
            both_ms = None if both is None else median_ms(both)
            same = replays_agree(variant, work, both or forward)
        ms = both_ms or forward_ms
        rate = f"{work.flops / ms / 1e9:.0f} TFLOP/s" if work.flops else f"{work.moved_bytes / ms / 1e6:.0f} GB/s"
        yield {
            "op": op.spec.name,
            "variant": variant.name,
            "shape": work.label,
            "fwd ms": f"{forward_ms:.3f}",
            "fwd+bwd ms": "" if both_ms is None else f"{both_ms:.3f}",
            "rate": rate,
            **yardsticks(work.moved_bytes, ms, large_ms),
            "replays": "same" if same else "DIFFER",
        }


def line(values: list[object]) -> str:
    """One row of the table."""
    return " ".join(f"{value!s:<{width}}" for value, width in zip(values, WIDTHS, strict=True)).rstrip()


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", required=True, choices=["all", *WORKLOADS])
    parser.add_argument("--variant", action="append", help="only variants of this name; default: all but the reference")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Check, time and print; 1 if a variant was red or its replays differed, 2 without a CUDA device."""
    options = parsed(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing can be timed", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    wanted = selected(options.op, options.variant)
    refused, report = red(wanted)
    print(report, end="\n" if report else "")
    large_ms = median_ms(copy_run(LARGE_COPY_BYTES, torch.device("cuda")))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"a copy of 2 GiB: {LARGE_COPY_BYTES / large_ms / 1e6:.0f} GB/s read and written\n{line(list(COLUMNS))}")
    rows, failed = [], bool(refused)
    for op, variant in wanted:
        if test_id(op, variant) in refused:
            note: list[object] = [op.spec.name, variant.name, "not timed: conformance is red"]
            print(line(note + [""] * (len(COLUMNS) - len(note))), flush=True)
            continue
        for row in measured(op, variant, large_ms):
            rows.append(row)
            failed |= row["replays"] != "same"
            print(line([row[name] for name in COLUMNS]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
