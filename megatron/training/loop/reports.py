"""From the stages' reports to the numbers of a step: gathered by logical coordinates, added in logical order."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.contracts.batch import StageReport
from megatron.core.ops.reading import start_reading
from megatron.core.optimizer.clip_grads import after_not_finite
from megatron.core.process_groups.collectives import all_gather
from megatron.core.process_groups.groups import ProcessGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedLayers:
    """What every rank expects in the reports: per-layer losses by name, each of all MoE layers (global indices), and
    how many depths of multi-token prediction have a loss."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    depths: int = 0

    @property
    def first_layer_column(self) -> int:
        """Numbers of a report before the per-layer ones: sum and tokens of the trunk and of every depth."""
        return 2 + 2 * self.depths

    @property
    def width(self) -> int:
        """Numbers of a report."""
        return self.first_layer_column + len(self.names) * len(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLosses:
    """Means over a global batch, the same on every rank."""

    losses: dict[str, float]
    num_tokens: int


def start_losses(
    reports: Sequence[Sequence[Sequence[StageReport]]],
    expected: ReportedLayers,
    groups: ProcessGroups,
    iteration: int,
    *,
    check: bool = True,
    training: bool = True,
) -> Callable[[], StepLosses]:
    """Combine the reports of all micro-batches of a step, or of a batch of an evaluation (``training`` off); the host
    waits for them when it calls the result.

    ``reports[chunk][pass][micro-batch]`` are this rank's; its pass p is logical shard p * DP + its rank. Values travel
    as fp64, which holds every fp32 and every count exactly; a value comes from the one stage that owns it, and
    additions happen here on the host, by logical shard, then micro-batch, then layer.

    The result raises:
        TrainingStoppedError: with ``check``: a loss is not finite; on every rank at once, naming shard,
            micro-batch and rank.
    """
    rows = _pack(reports, expected, groups.device)
    stages = all_gather(groups.pp, rows)
    # Each value is reported by one stage; presence says which.
    owned = torch.zeros_like(stages[0])
    for stage in stages:
        owned = torch.where(stage[..., :1] > 0, stage, owned)
    by_rank = start_reading(all_gather(groups.dp, owned[..., 1]))

    @functools.cache
    def losses() -> StepLosses:
        shards = by_rank().transpose(0, 1).flatten(0, 1).tolist()
        if check:
            _require_finite(shards, groups, iteration, training=training)
        return _add_up(shards, expected)

    return losses


def _add_up(shards: list[list[list[float]]], expected: ReportedLayers) -> StepLosses:
    sums, tokens = [0.0] * (1 + expected.depths), [0] * (1 + expected.depths)
    layer_sums = dict.fromkeys(expected.names, 0.0)
    for microbatches in shards:
        for values in microbatches:
            for depth in range(1 + expected.depths):
                sums[depth] += values[2 * depth]
                tokens[depth] += int(values[2 * depth + 1])
            for n, name in enumerate(expected.names):
                start = expected.first_layer_column + n * len(expected.layers)
                layer_sums[name] += sum(values[start : start + len(expected.layers)])
    passes = len(shards) * len(shards[0]) * max(1, len(expected.layers))
    losses = {"lm loss": sums[0] / max(1, tokens[0])}
    losses |= {name: total / passes for name, total in layer_sums.items()}
    losses |= {mtp_name(depth): sums[depth] / max(1, tokens[depth]) for depth in range(1, 1 + expected.depths)}
    return StepLosses(losses=losses, num_tokens=tokens[0])


def mtp_name(depth: int) -> str:
    """Megatron's name of the loss of one depth of multi-token prediction, from 1."""
    return f"mtp_{depth} loss"


def _pack(
    reports: Sequence[Sequence[Sequence[StageReport]]], expected: ReportedLayers, device: torch.device
) -> torch.Tensor:
    """``[pass, micro-batch, width, 2]`` fp64: (present, value) of loss sum and token count of the trunk and of every
    depth, per-layer values."""
    passes, num_microbatches = len(reports[0]), len(reports[0][0])
    columns: list[torch.Tensor | None] = [None] * (passes * num_microbatches * expected.width)
    for chunk in reports:
        for index, report in enumerate(report for one_pass in chunk for report in one_pass):
            present = list(enumerate([report.loss_sum, report.num_tokens, *itertools.chain(*report.depths)]))
            for n, name in enumerate(expected.names):
                values = report.per_layer.get(name, {})
                present += [
                    (expected.first_layer_column + n * len(expected.layers) + expected.layers.index(layer), value)
                    for layer, value in values.items()
                ]
            for column, value in present:
                if value is not None:
                    columns[index * expected.width + column] = value
    # All values of a type at once: each by itself would be three launches, at the end of the step.
    values = torch.zeros(len(columns), dtype=torch.float64, device=device)
    zero, one = values.new_zeros(()), values.new_ones(())
    for dtype in dict.fromkeys(value.dtype for value in columns if value is not None):
        other = zero.to(dtype)
        values += torch.stack([value if value is not None and value.dtype == dtype else other for value in columns])
    presence = torch.stack([zero if value is None else one for value in columns])
    packed = torch.stack((presence, values), dim=1).detach()
    return packed.view(passes, num_microbatches, expected.width, 2)


def _require_finite(shards: list[list[list[float]]], groups: ProcessGroups, iteration: int, *, training: bool) -> None:
    sums = ((shard, index, values[0]) for shard, reports in enumerate(shards) for index, values in enumerate(reports))
    found = next((each for each in sums if not math.isfinite(each[2])), None)
    if found is None:
        return
    shard, index, loss_sum = found
    topology = groups.topology
    rank = topology.rank(tp=0, dp=shard % topology.dp, pp=topology.pp - 1)
    when = f"iteration {iteration}" if training else f"evaluation after iteration {iteration}"
    rest = (
        after_not_finite(iteration)
        if training
        else (
            "nothing was updated, but the weights are those that this iteration left; go on from an earlier checkpoint "
            "(--load, --ckpt-step) with a smaller --lr or --clip-grad"
        )
    )
    raise TrainingStoppedError(
        f"{when}: the loss of logical shard {shard}, micro-batch {index} is {loss_sum} (rank {rank}); {rest}"
    )
