"""The fingerprint of a training run: what the engine digests, joined to what the step showed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.moe import Z_LOSS_NAME
from megatron.core.digest.bits import digest_hex
from megatron.core.process_groups.collectives import barrier, gather_objects, sum_integers
from megatron.training.data.batches import BatchReader
from megatron.training.loop.agreed_writer import AgreedWriter, stopping_together
from megatron.training.loop.build import Run
from megatron.training.observe.fingerprint import StepRecord
from megatron.training.observe.run_manifest import (
    Circumstances,
    folder_problems,
    launch_part,
    prepare_folder,
    trajectory_part,
)
from megatron.training.observe.software import device_model, source_digest, versions
from megatron.training.observe.step_record import StepMetrics
from megatron.training.setup.determinism import kept_promise, switches
from megatron.training.setup.environment import host_name, read_environment
from megatron.training.setup.pinned_environment import launch_environment, recorded_environment
from megatron.training.setup.seeds import generator_digest, key_state_digest


def run_manifest(run: Run, start_iteration: int) -> dict[str, dict]:
    """The trajectory part and this launch's part of the manifest; collective."""
    environment = read_environment()
    circumstances = Circumstances(
        data_digest=run.data_digest,
        versions=versions(),
        device=device_model(run.groups.device),
        ops=run.ops.manifest(),
        environment=recorded_environment(environment, run.config.numerics),
    )
    hosts = gather_objects(run.groups.world, host_name())
    launch = launch_part(
        run.config,
        run.groups.topology,
        start_iteration=start_iteration,
        hosts=list(dict.fromkeys(str(h) for h in hosts)),
        backend=run.backend,
        promise=kept_promise(run.config.numerics, run.ops.promise),
        nccl=launch_environment(environment),
        switches=switches(),
        source=source_digest(),
    )
    return {"trajectory": trajectory_part(run.config, run.layout, circumstances), "launch": launch}


class Fingerprints:
    """Writes the lines of a run; every rank holds one and calls it after every step.

    Raises:
        ConfigError: the folder holds the fingerprint of a run with another trajectory.
        DamagedInputError: a file in the folder is damaged.
    """

    def __init__(self, run: Run, manifest: dict[str, dict]) -> None:
        settings = run.config.fingerprint
        folder = Path(settings.fingerprint_dir)
        problems = folder_problems(folder, manifest["trajectory"])
        barrier(run.groups.world)
        if problems:
            raise ConfigError(problems)
        with stopping_together(run.groups.world):
            if run.launch.rank == 0:
                prepare_folder(folder, manifest["trajectory"], manifest["launch"])
        self._run, self._state = run, settings.fingerprint_level == "state"
        interval = settings.fingerprint_interval
        self._writer = AgreedWriter(run.groups.world, folder, rank=run.launch.rank, interval=interval)

    def on_step(self, step: StepMetrics, reader: BatchReader) -> None:
        """After a step, on every rank.

        Raises:
            TrainingStoppedError: an earlier launch wrote another line for this iteration.
        """
        digest = reader.take_digest()
        if not self._writer.wants(step.iteration):
            return
        balancing = [value for name, value in step.losses.items() if "load_balancing" in name]
        numbers = StepRecord(
            iteration=step.iteration,
            consumed_samples=step.consumed_samples,
            lm_loss=step.losses["lm loss"],
            load_balancing_loss=sum(balancing) if balancing else None,
            z_loss=step.losses.get(Z_LOSS_NAME),
            mtp_losses=tuple(value for name, value in step.losses.items() if name.startswith("mtp_")),
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
        )
        if not self._state:
            self._writer.write(numbers, numbers)
            return
        optimizer, groups = self._run.step.optimizer, self._run.groups
        whole = sum_integers(groups.dp, digest.to(groups.device)).cpu()
        keys = key_state_digest(self._run.config.training.seed, step.iteration)
        self._writer.write(
            replace(numbers, **_hex(optimizer.state_digests()), data=digest_hex(whole), rng=keys),
            replace(numbers, **_hex(optimizer.local_digests()), data=digest_hex(digest), rng=generator_digest()),
        )

    def close(self) -> None:
        """Sync and close the files."""
        self._writer.close()


def _hex(digests: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: digest_hex(total) for name, total in digests.items()}
