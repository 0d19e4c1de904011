"""The global norm that no layout changes, its clip factor, and the stop on a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megatron.core.config.errors import TrainingStoppedError
from megatron.core.contracts.flat_buffer import FlatBuffer, Span
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.ops.norm_blocks.limbs import SIZE, norm_from_limbs
from megatron.core.process_groups.collectives import gather_objects, sum_integers
from megatron.core.process_groups.groups import ProcessGroups

_NAMES_SHOWN = 3
_RANKS_SHOWN = 8


def counts_here(spec: ParamSpec, groups: ProcessGroups) -> bool:
    """Whether this rank counts its piece of the parameter in sums over the world.

    Data-parallel ranks own disjoint pieces. Of copies on tensor-parallel ranks the first counts, of a parameter held
    by both pipeline ends the first stage.
    """
    copies = groups.etp if spec.expert else groups.tp
    if spec.tp_replicated and not copies.is_first:
        return False
    if len(spec.stages) == 2:
        return groups.embedding is not None and groups.embedding.is_first
    return True


def clip_factor(norm: float, clip_grad: float) -> float:
    """min(1, clip_grad / (norm + 1e-6)) in fp64, Megatron's formula; 1 where clipping is off (0). It is rounded to
    fp32 once, where it meets the gradient."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0.0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Norm of the gradient (or of the parameters) over the whole world; equal on all ranks.

    ``finite`` also covers what the norm does not count: every rank's gradient before the reduction.
    """

    norm: float
    num_zeros: int | None
    finite: bool


def measure(
    counted: Iterable[torch.Tensor],
    norm_blocks: Callable[..., object],
    groups: ProcessGroups,
    *,
    zeros_of: Iterable[torch.Tensor] | None = None,
    extremes: Sequence[torch.Tensor] = (),
) -> Measured:
    """Norm of everything ``counted`` on all ranks, number of zeros in ``zeros_of``, and whether all is finite.

    Exact integers are summed, so the norm is the same on every rank and layout; its only rounding is the last one.
    """
    totals = torch.zeros(SIZE + 2, dtype=torch.int64, device=groups.device)
    of_norm, zero_count, not_finite_count = totals.split((SIZE, 1, 1))
    for flat in counted:
        of_norm.add_(norm_blocks(flat))
    for flat in zeros_of or ():
        zero_count.add_((flat == 0).sum())
    if extremes:
        not_finite_count.add_((~torch.isfinite(torch.cat(list(extremes)))).sum())
    *limbs, zeros, not_finite = sum_integers(groups.world, totals).tolist()
    norm = norm_from_limbs(limbs)
    return Measured(
        norm=norm,
        num_zeros=None if zeros_of is None else zeros,
        finite=math.isfinite(norm) and not_finite == 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Findings:
    """What one rank finds: whether something it gave to the sums was not finite, the parameters where it still sees
    that, and those where a sum it owns is not finite."""

    gave: bool
    given: list[str]
    owned: list[str]


def _findings(buffers: Sequence[FlatBuffer]) -> _Findings:
    gave, given, owned = False, [], []
    for buffer in buffers:
        for span, ends in zip(buffer.whole, buffer.local_extremes, strict=True):
            if not torch.isfinite(ends).all():
                gave = True
                given += _not_finite(buffer, span)
        for span in buffer.owned:
            owned += _not_finite(buffer, span)
    return _Findings(gave=gave, given=given, owned=owned)


def _not_finite(buffer: FlatBuffer, span: Span) -> list[str]:
    return [p.spec.name for p in span.pieces if not torch.isfinite(buffer.grad[p.offset : p.stop]).all()]


def _shortened(items: Sequence[str], shown: int) -> str:
    distinct = list(dict.fromkeys(items))
    more = f" and {len(distinct) - shown} more" if len(distinct) > shown else ""
    return ", ".join(distinct[:shown]) + more


def after_not_finite(iteration: int) -> str:
    """What a stop leaves and what to do about it, in words."""
    return (
        "weights and optimizer state are those of the iteration before; go on from the last checkpoint (--load) with a "
        f"smaller --lr or --clip-grad, or add --trace-dir DIR --trace-iterations {iteration} to see where it begins"
    )


def stop_not_finite(buffers: Sequence[FlatBuffer], groups: ProcessGroups, iteration: int) -> None:
    """Find out together where the gradient went wrong, and raise the same error on every rank.

    Call it on all ranks, with the buffers as the reduction left them. A rank whose own sum was finite is not named
    unless the sum over ranks is what overflowed.

    Raises:
        TrainingStoppedError: always; names iteration, ranks and parameters.
    """
    seen = cast(list[_Findings], gather_objects(groups.world, _findings(buffers)))
    overflown = [name for of_rank in seen for name in of_rank.owned]
    # A pass before the last leaves no trace in the buffers; then the sums say which parameters.
    origins = [(rank, f.given or overflown) for rank, f in enumerate(seen) if f.gave]
    what = "" if origins else "finite on every rank, but the sum over ranks overflows: "
    where = origins or [(rank, f.owned) for rank, f in enumerate(seen) if f.owned]
    ranks = [f"rank {rank} ({_shortened(names, _NAMES_SHOWN)})" for rank, names in where]
    raise TrainingStoppedError(
        f"iteration {iteration}: the gradient is not finite; {what}{_shortened(ranks, _RANKS_SHOWN)}; "
        f"{after_not_finite(iteration)}"
    )
