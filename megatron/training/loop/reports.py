"""From the stages' reports to the numbers of a step: gathered by logical coordinates, added in logical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.contracts.batch import StageReport
from megatron.core.process_groups.collectives import all_gather
from megatron.core.process_groups.groups import ProcessGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedLayers:
    """Which per-layer values every rank expects: the MoE layers' global indices, by the name of the loss."""

    names: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLosses:
    """Means over a global batch, the same on every rank."""

    losses: dict[str, float]
    num_tokens: int


def gather_losses(
    reports: Sequence[Sequence[Sequence[StageReport]]],
    expected: ReportedLayers,
    groups: ProcessGroups,
    iteration: int,
    *,
    check: bool = True,
) -> StepLosses:
    """Combine the reports of all micro-batches of a step.

    ``reports[chunk][pass][micro-batch]`` are this rank's; its pass p is logical shard p * DP + its rank. Values travel
    as fp64, which holds every fp32 and every count exactly; a value comes from the one stage that owns it, and
    additions happen here on the host, by logical shard, then micro-batch, then layer.

    Raises:
        TrainingStoppedError: with ``check``: a loss is not finite; on every rank at once, naming shard,
            micro-batch and rank.
    """
    rows = _pack(reports, expected, groups.device)
    stages = all_gather(groups.pp, rows)
    # Each value is reported by one stage; presence says which.
    owned = torch.zeros_like(stages[0])
    for stage in stages:
        owned = torch.where(stage[..., :1] > 0, stage, owned)
    by_rank = all_gather(groups.dp, owned[..., 1])
    shards = by_rank.transpose(0, 1).flatten(0, 1).tolist()
    loss_sum, tokens = 0.0, 0
    layer_sums = dict.fromkeys(expected.names, 0.0)
    for shard, microbatches in enumerate(shards):
        for index, values in enumerate(microbatches):
            if check:
                _require_finite(values[0], shard, index, groups, iteration)
            loss_sum += values[0]
            tokens += int(values[1])
            for n, name in enumerate(expected.names):
                start = 2 + n * len(expected.layers)
                layer_sums[name] += sum(values[start : start + len(expected.layers)])
    passes = len(shards) * len(shards[0]) * max(1, len(expected.layers))
    losses = {"lm loss": loss_sum / max(1, tokens)}
    losses |= {name: total / passes for name, total in layer_sums.items()}
    return StepLosses(losses=losses, num_tokens=tokens)


def _pack(
    reports: Sequence[Sequence[Sequence[StageReport]]], expected: ReportedLayers, device: torch.device
) -> torch.Tensor:
    """``[pass, micro-batch, 2 + names * layers, 2]`` fp64: (present, value) of loss sum, token count, per-layer
    values."""
    passes, num_microbatches = len(reports[0]), len(reports[0][0])
    width = 2 + len(expected.names) * len(expected.layers)
    packed = torch.zeros(passes * num_microbatches, width, 2, dtype=torch.float64, device=device)
    for chunk in reports:
        for index, report in enumerate(report for one_pass in chunk for report in one_pass):
            present = [(0, report.loss_sum), (1, report.num_tokens)]
            for n, name in enumerate(expected.names):
                values = report.per_layer.get(name, {})
                present += [
                    (2 + n * len(expected.layers) + expected.layers.index(layer), value)
                    for layer, value in values.items()
                ]
            for column, value in present:
                if value is not None:
                    packed[index, column, 0] = 1.0
                    packed[index, column, 1] = value.detach().to(torch.float64)
    return packed.view(passes, num_microbatches, width, 2)


def _require_finite(loss_sum: float, shard: int, index: int, groups: ProcessGroups, iteration: int) -> None:
    if loss_sum - loss_sum == 0.0:
        return
    topology = groups.topology
    rank = topology.rank(tp=0, dp=shard % topology.dp, pp=topology.pp - 1)
    raise TrainingStoppedError(
        f"iteration {iteration}: the loss of logical shard {shard}, micro-batch {index} is {loss_sum} (rank {rank}); "
        "weights and optimizer state are those of the iteration before"
    )
