"""Sizes and parameters of a Mamba-2 mixer: how they are cut and where they start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.config.mamba import A_MAX, A_MIN, CONV_WIDTH, DT_FLOOR, DT_MAX, DT_MIN
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.param_spec import Initial, ParamSpec
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.parameter import cut_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSizes:
    """Global sizes of a mixer, or with ``local`` those of one tensor-parallel rank."""

    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        """Channels of x and of the gate z."""
        return self.heads * self.head_dim

    @property
    def in_proj_parts(self) -> tuple[int, int, int, int, int]:
        """Rows of the input projection: z, x, B, C, dt."""
        return (self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads)

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: x, B, C."""
        return self.in_proj_parts[1:4]

    def local(self, tp: int) -> MambaSizes:
        """Sizes on one of ``tp`` ranks; whole groups stay together."""
        return MambaSizes(heads=self.heads // tp, head_dim=self.head_dim, groups=self.groups // tp, state=self.state)


def mamba_sizes(config: TransformerConfig, tp: int) -> MambaSizes:
    """Global sizes of a resolved configuration, checked for ``tp`` ranks.

    Raises:
        ValueError: groups of heads cannot be made, or cannot be dealt out whole to the ranks.
    """
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    if heads % groups or groups % tp:
        raise ValueError(
            f"{heads} Mamba heads in {groups} groups over {tp} tensor-parallel ranks: the groups must divide the heads "
            "and the ranks the groups"
        )
    return MambaSizes(heads=heads, head_dim=config.mamba_head_dim, groups=groups, state=config.mamba_state_dim)


def mixer_specs(name: str, sizes: MambaSizes, context: ModelContext) -> dict[str, ParamSpec]:
    """Specs of the mixer's own parameters by attribute name.

    A_log, D and dt_bias keep fp32 working weights. Vectors do not decay, the convolution's taps do.
    """
    channels = sum(sizes.conv_parts)
    bound = 1.0 / math.sqrt(CONV_WIDTH)
    uniform = Initial(kind="uniform", a=-bound, b=bound)
    steps = Initial(kind="inverse_softplus_log_uniform", a=DT_MIN, b=DT_MAX, floor=DT_FLOOR)
    one = Initial(kind="constant", a=1.0)
    heads, conv = (sizes.heads,), sizes.conv_parts
    return {
        "conv1d_weight": cut_spec(f"{name}.conv1d_weight", (channels, 1, CONV_WIDTH), 0, uniform, context, parts=conv),
        "conv1d_bias": cut_spec(f"{name}.conv1d_bias", (channels,), 0, uniform, context, parts=conv),
        "dt_bias": cut_spec(f"{name}.dt_bias", heads, 0, steps, context, fp32=True),
        "A_log": cut_spec(f"{name}.A_log", heads, 0, Initial(kind="log_uniform", a=A_MIN, b=A_MAX), context, fp32=True),
        "D": cut_spec(f"{name}.D", heads, 0, one, context, fp32=True),
        "norm.weight": cut_spec(f"{name}.norm.weight", (sizes.inner,), 0, one, context),
    }
