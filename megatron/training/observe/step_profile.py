"""Profiles the chosen steps of a run with PyTorch's profiler and leaves a summary in the run folder."""

from __future__ import annotations

import gzip
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.training.config.profile import ProfileConfig
from megatron.training.observe.kernel_groups import intervals_of, own_kernels, summary
from megatron.training.observe.run_manifest import write_json


def profile_file(rank: int) -> str:
    """Name of a rank's summary in the run folder."""
    return f"profile_rank_{rank:05d}.json"


class StepProfiler:
    """Watches this rank's steps; does nothing on ranks and steps that are not profiled, and never communicates."""

    def __init__(self, config: ProfileConfig, run_dir: str | None, rank: int, device: torch.device) -> None:
        wanted = config.profile and rank in config.profile_ranks
        self._steps = range(config.profile_step_start, config.profile_step_end) if wanted else range(0)
        self._folder, self._rank, self._device = Path(run_dir or "."), rank, device
        self._profile: profile | None = None
        self._seen: list[int] = []
        self._started = 0.0

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around one step. The summary is written behind the last profiled one."""
        if iteration not in self._steps:
            yield
            return
        if self._profile is None:
            self._start()
        self._seen.append(iteration)
        yield
        if iteration == self._steps[-1]:
            self.close()

    def _start(self) -> None:
        on_gpu = self._device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self._wait()
        self._profile.start()
        self._started = time.monotonic()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Write what was profiled, also where the run ended before the last step of the window; safe to call twice."""
        if self._profile is None:
            return
        self._wait()
        wall_s = time.monotonic() - self._started
        self._profile.stop()
        summary_path = self._folder / profile_file(self._rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        trace_path = summary_path.with_suffix(".trace.json.gz")
        self._profile.export_chrome_trace(str(trace_path))
        self._profile = None
        facts = {"rank": self._rank, "iterations": self._seen, "wall_s": wall_s / len(self._seen), **self._memory()}
        if self._device.type == "cuda":
            with gzip.open(trace_path, "rt", encoding="utf-8") as file:
                intervals = intervals_of(json.load(file))
            facts["gpu"] = summary(intervals, len(self._seen), own_kernels())
        write_json(summary_path, facts)

    def _memory(self) -> dict[str, object]:
        """Most memory in use at once since the process began, in bytes; of the device only where it is a GPU."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._device.type != "cuda":
            return {"device": "cpu", "peak_memory_bytes": None, "peak_host_memory_bytes": host, "gpu": None}
        return {
            "device": torch.cuda.get_device_name(self._device),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self._device),
            "peak_host_memory_bytes": host,
        }
