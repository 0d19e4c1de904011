"""How many parameters a model has and how many bytes a rank needs for them; from specs and plans, without a weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.distributed.bucket_plan import BufferPlan

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
ENDS = {
    "embedding": "embedding",
    "output_layer": "output layer",
    "decoder": "final norm",
    "mtp": "multi-token prediction",
}
"""What is no layer of the main part, by the first word of the parameters' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSize:
    """Parameters of all layers of one kind, or of one of ``ENDS``; ``active`` ones take part in a token's pass."""

    part: str
    count: int
    total: int
    active: int


def count_parameters(specs: Iterable[ParamSpec], layers: str, experts_per_token: int) -> list[PartSize]:
    """Parameters of a whole model by kind of layer, in order of appearance in ``layers``, then its ends.

    ``specs`` are those of all pipeline stages; a parameter that several hold is counted once. ``layers`` are the
    pattern's symbols. Of a routed expert's weight the share of the chosen experts is active. Rows that pad the
    vocabulary count.
    """
    totals = {part: [0, 0] for part in (*dict.fromkeys(layers), *ENDS.values())}
    for spec in {spec.name: spec for spec in specs}.values():
        found = _LAYER.match(spec.name)
        part = layers[int(found[1])] if found else ENDS[spec.name.partition(".")[0]]
        numel = math.prod(spec.shape)
        totals[part][0] += numel
        totals[part][1] += numel // spec.shape[0] * experts_per_token if spec.expert else numel
    return [
        PartSize(part=part, count=layers.count(part) if part in layers else 1, total=total, active=active)
        for part, (total, active) in totals.items()
        if total
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes a rank holds for its parameters from the start of a run to its end."""

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(
    plans: Sequence[BufferPlan],
    *,
    weight_bytes: int,
    distributed_optimizer: bool,
    pipeline_size: int,
    num_passes: int = 1,
    num_moments: int = 2,
) -> StateBytes:
    """Bytes of one rank's buffers, padding included.

    ``weight_bytes`` is the size of a working weight (2 in bfloat16). Gradients, masters and moments are fp32; with
    the distributed optimizer masters and moments are cut over the ranks that share a bucket. A parameter of both
    pipeline ends has two gradients where one rank holds both. Several passes a step (logical shards per rank) carry at
    most two more fp32 sums of a rank's own part.
    """
    weights = gradients = state = 0
    for plan in plans:
        weights += plan.numel * (4 if plan.key.fp32 else weight_bytes)
        gradients += 4 * plan.numel * (2 if plan.key.two_stage and pipeline_size == 1 else 1)
        if num_passes > 1:
            gradients += 2 * 4 * plan.numel // plan.ranks
        state += 4 * plan.numel // (plan.ranks if distributed_optimizer else 1)
    return StateBytes(weights=weights, gradients=gradients, masters=state, moments=num_moments * state)
