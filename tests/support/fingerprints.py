"""Fingerprint folders made without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from megatron.training.config.manifest import Json
from megatron.training.config.resolve import logical_layout, topology_of
from megatron.training.config.run import RunConfig
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, FingerprintFile, FingerprintWriter, StepRecord
from megatron.training.observe.run_manifest import Circumstances, launch_part, prepare_folder, trajectory_part
from tests.support.settings import effective

CIRCUMSTANCES = Circumstances(
    data_digest="d1",
    versions={"torch": "2.11.0"},
    device={"type": "cpu", "instruction_set": "AVX2"},
    ops={"rms_norm": {"variant": "reference", "guarantee": "LAYOUT", "source": "00"}},
    environment={},
)


def record(iteration: int, **changes: object) -> StepRecord:
    """What a step of a made-up run shows."""
    plain = StepRecord(
        iteration=iteration,
        consumed_samples=8 * iteration,
        lm_loss=5.0 / iteration,
        load_balancing_loss=0.25,
        grad_norm=1.5,
        learning_rate=1e-3,
        params=f"{iteration:032x}",
        main_params="a" * 32,
        exp_avg="b" * 32,
        exp_avg_sq="c" * 32,
        rng="d" * 32,
        data="e" * 32,
    )
    return dataclasses.replace(plain, **changes)


def manifest_parts(config: RunConfig | None = None, world_size: int = 1) -> tuple[Json, Json]:
    """(trajectory, launch) of a made-up run."""
    config = config or effective(world_size=world_size)
    launch = launch_part(
        config, topology_of(config, world_size), start_iteration=0, hosts=["one"], backend="gloo", promise="LAYOUT"
    )
    return trajectory_part(config, logical_layout(config), CIRCUMSTANCES), launch


def write_folder(folder: Path, records: Iterable[StepRecord], config: RunConfig | None = None) -> Path:
    """A finished fingerprint folder of one rank."""
    prepare_folder(folder, *manifest_parts(config))
    shared = FingerprintFile(folder / FINGERPRINT_FILE)
    with FingerprintWriter(folder, shared, rank=0, interval=1) as writer:
        for step in records:
            writer.write(step, step)
    return folder
