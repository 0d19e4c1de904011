"""What is saved where and when, and what a run starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.errors import Problem
from megatron.core.config.fields import operational


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = operational(None)
    """Folder to write checkpoints into; none when not given."""
    save_interval: int | None = operational(None, flags=("--save-interval", "--persistent-save-interval"))
    """Iterations between checkpoints; needed by --save. The last iteration is always saved."""
    save_retain_interval: int | None = operational(None)
    """Keep older checkpoints only at multiples of this many iterations, itself a multiple of --save-interval."""
    load: str | None = operational(None)
    """Folder of checkpoints to go on from; a folder without any means a start from the seed."""
    pretrained_checkpoint: str | None = operational(None)
    """Folder of checkpoints to take weights from, as with --finetune, where --load has nothing."""
    ckpt_step: int | None = operational(None)
    """Load the checkpoint of this iteration instead of the newest one."""
    ckpt_format: Literal["torch_dist"] = operational("torch_dist", flags=("--ckpt-format", "--dist-ckpt-format"))
    """torch_dist: PyTorch's distributed checkpoint format."""
    async_save: bool = operational(False)
    """Write checkpoints in the background from a private copy of the state, while training goes on."""
    save_optim: bool = operational(True, flags=("--no-save-optim",), negates=True)
    """Moments and step count in checkpoints; the weights are fp32 either way."""
    save_rng: bool = operational(True, flags=("--no-save-rng",), negates=True)
    """States of the random generators in checkpoints."""
    load_optim: bool = operational(True, flags=("--no-load-optim",), negates=True)
    """Taking moments, step count and the place on the schedule from the checkpoint. When off, they start as in a new
    run; weights and position in the data are the checkpoint's."""
    load_rng: bool = operational(True, flags=("--no-load-rng",), negates=True)
    """Taking the states of the random generators from the checkpoint. When off, they are as the seed sets them."""
    finetune: bool = operational(False)
    """Take the weights only, and begin at iteration 0 with the first sample."""
    override_opt_param_scheduler: bool = operational(
        False, flags=("--override-opt-param-scheduler", "--override-opt_param-scheduler")
    )
    """Go on with the learning-rate and weight-decay schedule of this command line instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = operational(
        False, flags=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler")
    )
    """Go on with the checkpoint's schedule whatever this command line says of it."""
    override_ckpt_iteration: int | None = operational(None)
    """Count on from this iteration, and from its place in the data, instead of the checkpoint's."""
    exit_on_missing_checkpoint: bool = operational(False)
    """Stop (exit code 3) where --load has no checkpoint, instead of starting from the seed."""
    new_logical_layout: bool = operational(False)
    """Go on under another logical layout than the checkpoint's: its state, bit for bit, but a new trajectory."""

    def problems(self) -> list[Problem]:
        """Everything about these settings that cannot work, without looking at a file."""
        return [*self._save_problems(), *self._load_problems()]

    def _save_problems(self) -> Iterator[Problem]:
        if self.save is not None and self.save_interval is None:
            yield Problem(f"--save {self.save} alone", "how often to save", "add --save-interval")
        retain, interval = self.save_retain_interval, self.save_interval
        if retain is not None and (interval is None or retain % interval):
            yield Problem(
                f"--save-retain-interval {retain} with --save-interval {interval}",
                "a multiple of --save-interval",
                "--save-retain-interval or --save-interval",
            )
        if self.async_save and self.save is None:
            yield Problem("--async-save without --save", "a folder to save into", "add --save, or drop --async-save")

    def _load_problems(self) -> Iterator[Problem]:
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            both = "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler"
            yield Problem(both, "one of the two", "leave out one of them")
        sources = self.load is not None or self.pretrained_checkpoint is not None
        needing = {
            "--ckpt-step": self.ckpt_step is not None,
            "--finetune": self.finetune,
            "--override-ckpt-iteration": self.override_ckpt_iteration is not None,
            "--exit-on-missing-checkpoint": self.exit_on_missing_checkpoint,
            "--new-logical-layout": self.new_logical_layout,
        }
        for flag, given in needing.items():
            if given and not sources:
                yield Problem(f"{flag} without --load", "a checkpoint to start from", f"add --load, or drop {flag}")
        if self.override_ckpt_iteration is not None and self.finetune:
            both = "--override-ckpt-iteration with --finetune"
            yield Problem(both, "one of the two: --finetune begins at iteration 0", "leave out one of them")
