"""What one micro-batch is, and by which logical coordinates its noise, losses and counts are named."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Logical coordinates of one forward pass; no physical rank appears in them.

    ``shard`` is the logical data-parallel shard v, ``index`` the micro-batch of that shard in this step,
    ``num_microbatches`` how many the shard has, ``iteration`` the 1-based step.

    The rest is for the layers and set by the model: ``application`` of ``applications`` uses of one block of weights in
    this pass, ``recomputing`` in a second forward of the same layers, which counts and reports nothing, and
    ``loss_weight`` (fp32 scalar), see ``weight``.
    """

    iteration: int
    shard: int
    index: int
    num_microbatches: int
    training: bool = True
    application: int = 0
    applications: int = 1
    recomputing: bool = False
    loss_weight: torch.Tensor | None = None

    @property
    def weight(self) -> float | torch.Tensor:
        """Weight of a mean over this micro-batch in the loss that is differentiated: 1 / number of micro-batches, or
        ``loss_weight`` where the gradient is divided by the tokens of the whole step at the end."""
        return 1.0 / self.num_microbatches if self.loss_weight is None else self.loss_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of token sequences; every pipeline stage and tensor-parallel rank sees the same one.

    ``tokens_BS``, ``labels_BS`` and ``position_ids_BS`` are int64, ``loss_mask_BS`` is fp32 of zeros and ones.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    position_ids_BS: torch.Tensor


@dataclass(kw_only=True, slots=True)
class StageReport:
    """What one forward pass of one stage returns besides its output; detached and equal on all tensor-parallel ranks.

    ``loss_sum`` (fp32, sum of masked token losses) and ``num_tokens`` (int64, unmasked tokens) come from the last
    stage only; ``depths`` likewise (loss sum, tokens) of every depth of multi-token prediction. ``per_layer`` holds
    fp32 scalars by name and global layer index, e.g. ``load_balancing_loss``: a MoE layer's auxiliary loss of this
    micro-batch divided by its coefficient. They are added up in logical and layer order, so that no stage border can
    change a bit.
    """

    loss_sum: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    depths: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    per_layer: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def add_layer_value(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Record one layer's value; that of a further application of the layer is added to it."""
        values = self.per_layer.setdefault(name, {})
        values[layer] = values[layer] + value if layer in values else value
