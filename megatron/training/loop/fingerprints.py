"""The fingerprint of a training run: what the engine digests, joined to what the step showed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.moe import Z_LOSS_NAME
from megatron.core.digest.bits import digest_hex
from megatron.core.process_groups.collectives import barrier, gather_objects, sum_integers
from megatron.training.config.manifest import folder_problems
from megatron.training.data.batches import BatchReader
from megatron.training.loop.agreed_writer import AgreedWriter, stopping_together
from megatron.training.loop.build import Run
from megatron.training.observe.fingerprint import FINGERPRINT_FILE, FingerprintFile, StepRecord
from megatron.training.observe.machine import MISSING_NVML, load_nvml, machine_part
from megatron.training.observe.run_manifest import Circumstances, launch_part, prepare_folder, trajectory_part
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
        machines=_machines(run, environment),
        backend=run.backend,
        promise=kept_promise(run.config.numerics, run.ops.promise),
        nccl=launch_environment(environment),
        switches=switches(),
        source=source_digest(),
    )
    return {"trajectory": trajectory_part(run.config, run.layout, circumstances), "launch": launch}


def _machines(run: Run, environment: Mapping[str, str]) -> list[object]:
    """The facts of every machine, by its first rank; collective. Says once what is missing for them."""
    mine = None
    if run.launch.local_rank == 0:
        on_gpu = run.groups.device.type == "cuda"
        nvml = load_nvml() if on_gpu else None
        if on_gpu and nvml is None and run.launch.rank == 0:
            print(MISSING_NVML, file=sys.stderr, flush=True)
        mine = machine_part(host_name(), environment, nvml)
    return [facts for facts in gather_objects(run.groups.world, mine) if facts is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A step whose digests may still be on their way to the host; ``arrived`` tells when they are here.

    ``digests`` is int64 ``[n, 2]``: those of the whole state, those of this rank's, then the data of the whole batch.
    """

    numbers: StepRecord
    kinds: tuple[str, ...]
    digests: torch.Tensor
    arrived: torch.cuda.Event | None
    data: str
    keys: str
    generators: str

    def records(self) -> tuple[StepRecord, StepRecord]:
        """The layout-free line and this rank's; waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        texts, count = [digest_hex(total) for total in self.digests], len(self.kinds)
        whole: dict[str, Any] = dict(zip(self.kinds, texts[:count], strict=True))
        own: dict[str, Any] = dict(zip(self.kinds, texts[count : 2 * count], strict=True))
        return (
            replace(self.numbers, **whole, data=texts[-1], rng=self.keys),
            replace(self.numbers, **own, data=self.data, rng=self.generators),
        )


class Fingerprints:
    """Writes the lines of a run; every rank holds one and calls it after every step.

    On a GPU the line of a step is written when the next one is over, so that no step waits for digests; ``settle``
    writes what is left, before anything that a later run may go on from and at the end.

    Raises:
        ConfigError: the folder holds the fingerprint of another trajectory, or another process is writing it.
        DamagedInputError: a file in the folder is damaged.
    """

    def __init__(self, run: Run, manifest: dict[str, dict]) -> None:
        settings = run.config.fingerprint
        folder = Path(settings.fingerprint_dir)
        problems = folder_problems(folder, manifest["trajectory"], manifest["launch"]["operational"])
        barrier(run.groups.world)
        if problems:
            raise ConfigError(problems)
        shared: FingerprintFile | None = None
        with stopping_together(run.groups.world):
            if run.launch.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # Before anything there changes: it is refused where another run is writing.
                shared = FingerprintFile(folder / FINGERPRINT_FILE)
                prepare_folder(folder, manifest["trajectory"], manifest["launch"])
        self._run, self._state = run, settings.fingerprint_level == "state"
        interval = settings.fingerprint_interval
        self._writer = AgreedWriter(run.groups.world, folder, shared, rank=run.launch.rank, interval=interval)
        self._waiting: _Waiting | None = None

    def wants_digests(self, iteration: int) -> bool:
        """Whether the line of this step has digests that the step can make while it writes the state. On a CPU they
        are read afterwards: nothing is gained there."""
        on_gpu = self._run.groups.device.type == "cuda"
        return on_gpu and self._state and self._writer.wants(iteration)

    def on_step(self, step: StepMetrics, reader: BatchReader) -> None:
        """After a step, on every rank.

        Raises:
            TrainingStoppedError: an earlier launch wrote another line for this iteration, or for the one before.
        """
        self.settle()
        digest = reader.take_digest()
        if not self._writer.wants(step.iteration):
            return
        numbers = step_record(step)
        if not self._state:
            self._writer.write(numbers, numbers)
            return
        groups = self._run.groups
        whole, own = self._run.step.optimizer.digests_of_step()
        data = sum_integers(groups.dp, _to_device(digest, groups.device))
        digests, arrived = _to_host(torch.stack([*whole.values(), *own.values(), data]))
        self._waiting = _Waiting(
            numbers=numbers,
            kinds=tuple(whole),
            digests=digests,
            arrived=arrived,
            data=digest_hex(digest),
            keys=key_state_digest(self._run.config.training.seed, step.iteration),
            generators=generator_digest(),
        )
        if arrived is None:
            self.settle()

    def settle(self) -> None:
        """Write the line that waits, if one does.

        Raises:
            TrainingStoppedError: an earlier launch wrote another line for its iteration.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._writer.write(*waiting.records())

    def close(self) -> None:
        """Write the line that waits, sync and close the files. Meets nobody, since an error may have left the other
        ranks elsewhere: a line that is there already is not compared, which ``settle`` does at the end of a run."""
        waiting, self._waiting = self._waiting, None
        try:
            if waiting is not None and not self._writer.compares(waiting.numbers.iteration):
                self._writer.write(*waiting.records())
        finally:
            self._writer.close()


def step_record(step: StepMetrics) -> StepRecord:
    """The numbers of a step, without digests."""
    balancing = [value for name, value in step.losses.items() if "load_balancing" in name]
    return StepRecord(
        iteration=step.iteration,
        consumed_samples=step.consumed_samples,
        lm_loss=step.losses["lm loss"],
        load_balancing_loss=sum(balancing) if balancing else None,
        z_loss=step.losses.get(Z_LOSS_NAME),
        mtp_losses=tuple(value for name, value in step.losses.items() if name.startswith("mtp_")),
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
    )


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; a plain one would wait until all that was launched before is done."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is complete; none where it is complete already."""
    if values.device.type != "cuda":
        return values, None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived
