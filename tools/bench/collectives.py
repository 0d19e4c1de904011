"""Times ordered sums over ranks against the backend's, and the reproducible norm against torch's, on GPUs of one host.

    python -m tools.bench.collectives                    every GPU of this machine
    python -m tools.bench.collectives --ranks 2 --mib 256 --json times.json

Per collective, type and size: the median over REPEATS of the slowest rank, by CUDA events, all ways measured in turn;
the ratio to the backend's own; and whether the result has the bits of the stated order. Ways:

* nccl: the backend's sum, in the tensor's type, in an order of its own
* ordered: megatron.core.process_groups.ordered_reduce
* copied: the way it was before: this rank's own part travels as well, and sums are rounded and placed by themselves

Exits with 1 where a result has other bits, with 2 without two GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold.reference import blocked_fold as definition
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.norm_blocks.limbs import norm_from_limbs
from megatron.core.process_groups.collectives import all_gather, all_to_all, all_to_all_terms, maximum
from megatron.core.process_groups.groups import Group, create_process_groups
from megatron.core.process_groups.ordered_reduce import OrderedSums
from megatron.core.process_groups.topology import plan_topology
from tools.bench.ended import run_to_end
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, REPEATS = 4, 25
QUEUE_CYCLES = 2_000_000
"""The GPU waits that long before a timed run, so that its launches are queued and host time is not measured."""
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIB = 1 << 20

Way = Callable[[], torch.Tensor]


@dataclass(kw_only=True)
class Row:
    """One collective, type and size in one way."""

    collective: str
    dtype: str
    mib: int
    way: str
    times_ms: list[float] = field(default_factory=list)
    bits: str = ""

    @property
    def median_ms(self) -> float:
        """Median of the slowest rank."""
        return statistics.median(self.times_ms)


class Bench:
    """The ways of one group; ``group`` holds all ranks of this host."""

    def __init__(self, group: Group, device: torch.device, fold: Callable[..., torch.Tensor]) -> None:
        self.group, self.device, self.fold = group, device, fold
        self.sums = OrderedSums(fold)

    def copied_reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """Every part through the exchange, this rank's own too, then one fold."""
        return self.fold(all_to_all(self.group, flat.view(self.group.size, -1)), self.group.size)

    def copied_all_reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """The same, rounded after it and gathered into a third tensor."""
        return all_gather(self.group, self.copied_reduce_scatter(flat).to(flat.dtype)).view(-1)

    def ways(self, flat: torch.Tensor) -> dict[str, dict[str, Way]]:
        """By collective and way; the backend's first."""
        group, size = self.group, self.group.size
        scattered, inplace = flat.new_empty(flat.numel() // size), flat.clone()
        parts = all_to_all_terms(group, flat.view(size, -1))

        def native_scatter() -> torch.Tensor:
            dist.reduce_scatter_tensor(scattered, flat, group=group.handle)
            return scattered

        def native_all() -> torch.Tensor:
            dist.all_reduce(inplace, group=group.handle)
            return inplace

        return {
            "reduce-scatter": {
                "nccl": native_scatter,
                "ordered": lambda: self.sums.reduce_scatter(group, flat),
                "copied": lambda: self.copied_reduce_scatter(flat),
            },
            "all-reduce": {
                "nccl": native_all,
                "ordered": lambda: self.sums.all_reduce(group, flat),
                "copied": lambda: self.copied_all_reduce(flat),
            },
            "part of it": {
                "exchange": lambda: all_to_all_terms(group, flat.view(size, -1))[0],
                "all-gather": lambda: all_gather(group, scattered),
                "fold": lambda: self.fold(parts, size),
            },
        }

    def measure(self, dtype: str, mib: int) -> list[Row]:
        """All ways for one type and size; sums are checked against the definition first."""
        kind = TYPES[dtype]
        numel = mib * MIB // kind.itemsize
        generator = torch.Generator(self.device).manual_seed(self.group.rank)
        flat = torch.randn(numel, generator=generator, device=self.device).to(kind)
        ways = self.ways(flat)
        rows, runs = [], []
        for collective, by_way in ways.items():
            want = self._definition(flat, collective)
            for way, run in by_way.items():
                row = Row(collective=collective, dtype=dtype, mib=mib, way=way)
                if collective != "part of it" and way != "nccl":
                    row.bits = "same" if self._everywhere(same_bits(run(), want)) else "OTHER"
                rows.append(row)
                runs.append(run)
        for repeat in range(WARM_UP + REPEATS):
            for row, run in zip(rows, runs, strict=True):
                taken = self._time_ms(run)
                if repeat >= WARM_UP:
                    row.times_ms.append(taken)
        return rows

    def _definition(self, flat: torch.Tensor, collective: str) -> torch.Tensor:
        if collective == "part of it":
            return flat[:0]
        mine = definition(all_to_all(self.group, flat.view(self.group.size, -1)), self.group.size)
        return mine if collective == "reduce-scatter" else all_gather(self.group, mine.to(flat.dtype)).view(-1)

    def _everywhere(self, fact: bool) -> bool:
        return not int(maximum(self.group, torch.tensor(int(not fact), dtype=torch.int64, device=self.device)))

    def _time_ms(self, run: Way) -> float:
        """One run, on the rank where it takes longest."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier(group=self.group.handle)
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        taken = torch.tensor(start.elapsed_time(end), device=self.device)
        return float(maximum(self.group, taken))


def fastest(name: str) -> Callable[..., torch.Tensor]:
    """The first variant of an op, which is the one a run on CUDA takes."""
    return next(op for op in ALL_OPS if op.spec.name == name).variants[0].fn


def norm_rows(device: torch.device, mib: int = 1024) -> list[Row]:
    """The reproducible norm beside torch's, fp32; ``bits`` says how far each is from a sum in fp64."""
    norm_blocks = fastest("norm_blocks")
    flat = torch.randn(mib * MIB // 4, generator=torch.Generator(device).manual_seed(1), device=device)
    ways: dict[str, Way] = {
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(flat),
        "norm_blocks": lambda: norm_blocks(flat),
    }
    exact = math.sqrt(math.fsum(part.double().square().sum().item() for part in flat.split(1 << 16)))
    norms = (float(torch.linalg.vector_norm(flat)), norm_from_limbs(norm_blocks(flat).tolist()))
    rows = [
        Row(collective="norm", dtype="fp32", mib=mib, way=way, bits=f"off by {abs(norm - exact) / exact:.1e}")
        for way, norm in zip(ways, norms, strict=True)
    ]
    for repeat in range(WARM_UP + REPEATS):
        for row, run in zip(rows, ways.values(), strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= WARM_UP:
                row.times_ms.append(start.elapsed_time(end))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Rows as text, with the ratio to the first way of the same collective, type and size."""
    lines = [f"{'collective':15} {'type':5} {'MiB':>5} {'way':25} {'ms':>8} {'min':>8} {'ratio':>6}  bits"]
    base: dict[tuple[str, str, int], float] = {}
    for row in rows:
        first = base.setdefault((row.collective, row.dtype, row.mib), row.median_ms)
        ratio = "" if row.collective == "part of it" else f"{row.median_ms / first:.3f}"
        lines.append(
            f"{row.collective:15} {row.dtype:5} {row.mib:5} {row.way:25} {row.median_ms:8.3f} "
            f"{min(row.times_ms):8.3f} {ratio:>6}  {row.bits}"
        )
    return lines


def as_rank(options: argparse.Namespace) -> int:
    """What one rank does; the first prints and writes."""
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = create_process_groups(plan_topology(world=world), device).dp
    bench = Bench(group, device, fastest("blocked_fold"))
    rows = [row for dtype in TYPES for mib in options.mib for row in bench.measure(dtype, mib)]
    failed = any(row.bits == "OTHER" for row in rows)
    if rank == 0:
        rows += norm_rows(device)
        print(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
        print("\n".join(table(rows)), flush=True)
        if options.json:
            found = [{**vars(row), "median_ms": row.median_ms} for row in rows]
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="GPUs to use; default: all")
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024], help="sizes of the tensor of one rank")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.started:
        return as_rank(options)
    ranks = options.ranks or torch.cuda.device_count()
    if ranks < 2 or ranks > torch.cuda.device_count():
        print(f"{torch.cuda.device_count()} GPUs: sums over ranks need two at least", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tools.bench.collectives", "--started", *arguments]
    return run_to_end(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
