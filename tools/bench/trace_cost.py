"""What fingerprints and traces cost a step: blocks of steps with and without them, taken in turns in one process.

    python -m tools.bench.trace_cost [--json FILE] [--pattern P] [--levels semantic,module,op] [--cycles N] [-- FLAGS]

The model is that of examples/nemotron3_nano_proxy.sh with fewer layers (1.9 billion parameters), mock data,
deterministic mode; FLAGS replace all of its flags. A cost is the median, over the cycles, of what a block with it took
beyond the block without it; that of "nothing" is of further blocks without, and says how far noise reaches. The steps
without a trace run in the model that has the probes of that level. Below the costs stands what bounds them: digests by
themselves on an idle device, and of each trace level, by step: tensors looked at and how many of them were known,
launches and bytes of their digests, what an event added to the step, and the seconds of the thread that writes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.trace.recorder import Recorder
from megatron.core.trace.tensor_digest import Digester
from megatron.training.config.training import FingerprintConfig
from megatron.training.loop.build import Run, build_run
from megatron.training.loop.fingerprints import Fingerprints, run_manifest
from megatron.training.setup.command_line import checked_config
from megatron.training.setup.environment import find_launch, read_environment
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/nemotron3_nano_proxy.sh"
PATTERN = "MEMEM*E"
LIMITS = {"metrics": 0.001, "state": 0.01, "semantic": 0.02, "module": 0.10, "op": 2.0}
"""Accepted costs, as parts of the step without."""
WARM_UP = 4
BLOCK = {"none": 4, "semantic": 4, "module": 3, "op": 1, "kernel": 1}
TRACED_FROM = 1_000_000


def example_flags(pattern: str) -> list[str]:
    """The flags of the example, with another pattern of layers."""
    command = ["env", "LAUNCHER=echo", "bash", EXAMPLE, "--hybrid-layer-pattern", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return shlex.split(done.stdout)[1:]


class Trainer:
    """A run, step by step; an iteration's number only says whether it is traced."""

    def __init__(self, run: Run) -> None:
        self.run, self.reader = run, run.reader(run.splits.train)
        self._iteration, self._consumed = 0, 0
        self.fingerprint_s = 0.0

    def block(self, steps: int, *, traced: bool = False, fingerprints: Fingerprints | None = None) -> float:
        """Seconds a step of so many, everything they leave behind included."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self._iteration += 1
            number = self._iteration + TRACED_FROM * traced
            digest = fingerprints is not None and fingerprints.wants_digests(number)
            step = self.run.step.run(self.reader, number, self._consumed, digest=digest)
            self._consumed = step.consumed_samples
            if fingerprints is not None:
                begin = time.perf_counter()
                fingerprints.on_step(step, self.reader)
                self.fingerprint_s += time.perf_counter() - begin
        if fingerprints is not None:
            fingerprints.settle()
        self.wait()
        return (time.perf_counter() - start) / steps

    def wait(self) -> None:
        """Until the device is idle."""
        if self.run.groups.device.type == "cuda":
            torch.cuda.synchronize()


def build(flags: list[str]) -> Run:
    """A run of one process; the argument dump is not shown."""
    with contextlib.redirect_stdout(sys.stderr):
        return build_run(checked_config(flags), find_launch(read_environment()))


def cost(plain: list[float], more: list[float]) -> dict[str, float]:
    """Seconds a step and the part that was added."""
    added = [b / a - 1 for a, b in zip(plain, more, strict=True)]
    return {"step_s": statistics.median(plain), "with_s": statistics.median(more), "cost": statistics.median(added)}


def fingerprint_costs(flags: list[str], folder: Path, cycles: int) -> dict[str, dict[str, float]]:
    """Costs of nothing and of both fingerprint levels, and what the digests take by themselves."""
    run = build(flags)
    manifest, writers = run_manifest(run, 0), {}
    for level in ("metrics", "state"):
        settings = FingerprintConfig(fingerprint_dir=str(folder / level), fingerprint_level=level)
        writers[level] = Fingerprints(
            dataclasses.replace(run, config=dataclasses.replace(run.config, fingerprint=settings)), manifest
        )
    trainer = Trainer(run)
    for writer in (None, *writers.values()):
        trainer.block(WARM_UP, fingerprints=writer)
    taken: dict[str, list[float]] = {"none": [], **{level: [] for level in writers}, "nothing": []}
    host = dict.fromkeys(taken, 0.0)
    for _ in range(cycles):
        for level, times in taken.items():
            trainer.fingerprint_s = 0.0
            times.append(trainer.block(BLOCK["none"], fingerprints=writers.get(level)))
            host[level] += trainer.fingerprint_s / (cycles * BLOCK["none"])
    found = {level: {**cost(taken["none"], taken[level]), "host_s": host[level]} for level in ("nothing", *writers)}
    digests = run.step.optimizer.held_digests
    reads = {"weights": digests.weights, "state": digests.state, "gradients": digests.gradients}
    found["alone_s"] = {what: alone_s(read, trainer) for what, read in reads.items()}
    buffers = [leaf for buffer in run.step.ddp.buffers for leaf in buffer.grads]
    digester = Digester(run.ops["digest_words"], run.ops["digest_rows"])
    found["alone_s"]["gradients, one digest"] = alone_s(lambda: digester.whole(buffers), trainer)
    params = [param for buffer in run.step.ddp.buffers for param in buffer.params]
    found["alone_s"]["weights, as parameters"] = alone_s(lambda: digester.whole(params), trainer)
    asked = {"step": {}, "with digests": {"digest": True}, "and the gradient's": {"digest": True, "digest_grad": True}}
    for what, more in asked.items():
        step = functools.partial(run.step.optimizer.step, lr=0.0, weight_decay=0.0, iteration=1, **more)
        found["alone_s"][what] = alone_s(step, trainer)
    found["state"]["parameters"] = float(parameters(run))
    for writer in writers.values():
        writer.close()
    return found


def alone_s(work: Callable[[], Any], trainer: Trainer) -> float:
    """Seconds one call takes on an idle device, the median of five."""
    times = []
    for _ in range(6):
        trainer.wait()
        start = time.perf_counter()
        work()
        trainer.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def parameters(run: Run) -> int:
    """Elements of all parameters of this rank."""
    return sum(p.numel() for chunk in run.chunks for p in chunk.model_parameters())


def counts(recorder: Recorder) -> dict[str, float]:
    """What a recorder has done so far."""
    reader, digester = recorder.reader, recorder.reader.digester
    return {
        "events": recorder.events,
        "tensors": reader.tensors,
        "known": reader.known,
        "launches": digester.launches,
        "bytes_read": digester.bytes_read,
        "writing_s": recorder.writer.seconds,
    }


def trace_cost(flags: list[str], folder: Path, level: str, cycles: int) -> dict[str, float]:
    """The cost of one trace level, how much it writes, and what its recorder did in a step."""
    window = f"{TRACED_FROM}:{2 * TRACED_FROM}"
    run = build([*flags, "--trace-dir", str(folder), "--trace-level", level, "--trace-iterations", window])
    if run.tracing is None or run.tracing.recorder is None:
        raise RuntimeError("the run is not traced")
    recorder = run.tracing.recorder
    run.tracing.open(run_manifest(run, 0))
    trainer = Trainer(run)
    trainer.block(WARM_UP)
    trainer.block(2, traced=True)
    recorder.writer.settle()
    before, began = written(folder), counts(recorder)
    plain, traced = [], []
    for _ in range(cycles):
        plain.append(trainer.block(BLOCK[level]))
        traced.append(trainer.block(BLOCK[level], traced=True))
    recorder.writer.settle()
    steps = cycles * BLOCK[level]
    done = {f"{key}_a_step": (value - began[key]) / steps for key, value in counts(recorder).items()}
    lines, size = (after - first for after, first in zip(written(folder), before, strict=True))
    run.tracing.close()
    return {**cost(plain, traced), "lines_a_step": lines / steps, "bytes_a_step": size / steps, **done}


def written(folder: Path) -> tuple[int, int]:
    """Lines and bytes of the trace so far."""
    raw = b"".join(path.read_bytes() for path in folder.glob("trace_rank_*.jsonl"))
    return raw.count(b"\n"), len(raw)


def free() -> None:
    """Give the memory of the last run back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show(name: str, found: dict[str, float]) -> None:
    """One row."""
    limit = LIMITS.get(name)
    said = "" if limit is None else f"at most {limit:.1%}: {'yes' if found['cost'] <= limit else 'NO'}"
    more = f"{found['host_s'] * 1e3:.2f} ms of the host" if "host_s" in found else ""
    if "lines_a_step" in found:
        more = f"{found['lines_a_step']:.0f} lines, {found['bytes_a_step'] / 2**20:.1f} MiB a step"
    times = f"{found['step_s'] * 1000:9.1f} {found['with_s'] * 1000:9.1f} {found['cost']:9.2%}"
    print(f"{name:10} {times}  {said:20} {more}", flush=True)


def show_bounds(found: dict[str, float]) -> None:
    """What a trace level's recorder did in a step."""
    added, events = found["with_s"] - found["step_s"], found["events_a_step"]
    print(
        f"{'':10} events {events:.0f}, tensors {found['tensors_a_step']:.0f}, known {found['known_a_step']:.0f}; "
        f"{found['launches_a_step']:.0f} launches, {found['bytes_read_a_step'] / 1e9:.2f} GB; "
        f"{added * 1e3:.1f} ms more, {added * 1e6 / events:.0f} us an event; "
        f"writing {found['writing_s_a_step'] * 1e3:.1f} ms",
        flush=True,
    )


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pattern", default=PATTERN)
    parser.add_argument("--levels", default="semantic,module,op")
    parser.add_argument("--cycles", type=int, default=5, help="blocks of each kind")
    options = parser.parse_args(words[:split])
    flags = [*words[split + 1 :]] or example_flags(options.pattern)
    folder = Path(tempfile.mkdtemp(prefix="trace_cost_"))
    results: dict[str, Any] = {"flags": flags, "device": device_name()}
    print(f"{device_name()}\n{'what':10} {'step ms':>9} {'with ms':>9} {'cost':>9}")
    try:
        found = fingerprint_costs(flags, folder, options.cycles)
        for level in ("nothing", "metrics", "state"):
            show(level, found[level])
        alone = ", ".join(f"{what} {took * 1000:.2f} ms" for what, took in found["alone_s"].items())
        print(f"{'':10} digests alone: {alone}", flush=True)
        for level in options.levels.split(",") if options.levels else ():
            free()
            found[level] = trace_cost(flags, folder / level, level, options.cycles)
            show(level, found[level])
            show_bounds(found[level])
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        options.json.write_text(json.dumps({**results, "costs": found, "limits": LIMITS}, indent=1) + "\n", "utf-8")
    return 0


def device_name() -> str:
    """What it runs on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
