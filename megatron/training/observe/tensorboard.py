"""TensorBoard events; needs the package tensorboard."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron.training.observe.step_record import EvalSplit, StepMetrics


class TensorBoard:
    """Megatron's scalar names, each with its twin over consumed samples."""

    def __init__(self, folder: Path, interval: int) -> None:
        self._writer, self._interval = SummaryWriter(str(folder)), interval

    def on_step(self, step: StepMetrics) -> None:
        """As ``Observer.on_step``."""
        if step.iteration % self._interval:
            return
        scalars: dict[str, float] = {
            "learning-rate": step.learning_rate,
            "batch-size": step.global_batch_size,
            **step.losses,
            "loss-scale": 1.0,
            "grad-norm": step.grad_norm,
        }
        if step.num_zeros is not None:
            scalars["num-zeros"] = step.num_zeros
        if step.params_norm is not None:
            scalars["params-norm"] = step.params_norm
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step.iteration)
            self._writer.add_scalar(f"{name} vs samples", value, step.consumed_samples)
        self._writer.add_scalar("iteration-time", step.elapsed_s, step.iteration)

    def on_evaluation(self, split: EvalSplit, iteration: int, consumed_samples: int, losses: dict[str, float]) -> None:
        """As ``Observer.on_evaluation``."""
        what = "validation" if split == "valid" else split
        for name, value in losses.items():
            self._writer.add_scalar(f"{name} {what}", value, iteration)
            self._writer.add_scalar(f"{name} {what} vs samples", value, consumed_samples)

    def close(self) -> None:
        """As ``Observer.close``."""
        self._writer.close()
