"""A training run with a planted fault, as a user starts it: FAULT FLAGS. It strikes in iteration 2 of legs B alone."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.ops.registry import build_table
from megatron.training.loop import build
from megatron.training.loop.build import build_run
from megatron.training.loop.pretrain import run_training
from megatron.training.setup.command_line import checked_config
from megatron.training.setup.distributed import stop_process_group
from megatron.training.setup.environment import find_launch, read_environment
from tests.support.planted import FAULTS, _Strike, nothing


class Armed:
    """A step whose fault is armed in iteration 2; everything else is the step's own."""

    def __init__(self, run: Any, fault: Any, strike: Any, armed: SimpleNamespace) -> None:
        self._run, self._fault, self._strike, self._armed = run, fault, strike, armed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.step, name)

    def run(self, reader: Any, iteration: int, consumed_samples: int, **more: Any) -> Any:
        """As ``TrainStep.run``."""
        self._armed.now = iteration == 2
        self._fault.before_step(self._run, self._strike, self._run.groups.world.rank)
        return self._run.step.run(reader, iteration, consumed_samples, **more)


def train(name: str, flags: list[str]) -> None:
    """Train; nothing of the run is left when it returns."""
    config = checked_config(flags)
    launch, fault, armed = find_launch(read_environment()), FAULTS[name], SimpleNamespace(now=False)
    strike = _Strike(Path(config.fingerprint.fingerprint_dir).parent.name.endswith("_b"), armed)
    build.build_table = lambda *args: fault.ops(build_table(*args), strike, launch.rank)
    run = build_run(config, launch)
    run = dataclasses.replace(run, step=Armed(run, fault, strike, armed))
    with (fault.around or nothing)(strike, launch.rank):
        run_training(run, time.monotonic())


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2:])
    stop_process_group()
