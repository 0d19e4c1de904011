"""Mamba-2 mixer: projection, causal convolution, state-space scan, gated norm, projection back."""

from __future__ import annotations

import torch

from megatron.core.config.mamba import CHUNK_SIZE, GATED_NORM_EPSILON
from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.contracts.param_spec import ParamSpec
from megatron.core.contracts.parameter import use_all_in_fp32, use_in_fp32
from megatron.core.ssm.mamba_params import mamba_sizes, mixer_specs
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.norm import NormColumnParallelLinear
from megatron.core.tensor_parallel.parameter import create_parameter
from megatron.core.tensor_parallel.row import RowParallelLinear


class GatedNorm(torch.nn.Module):
    """RMSNorm of ``y * silu(z)`` inside each group of channels.

    Groups lie whole on one tensor-parallel rank, so the statistics need no other rank.
    """

    def __init__(self, spec: ParamSpec, group_size: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = create_parameter(spec, context)
        self.group_size = group_size
        self._op = context.ops["gated_rms_norm"]

    def forward(self, y_BSX: torch.Tensor, z_BSX: torch.Tensor) -> torch.Tensor:
        """Normalised product in the activation type."""
        return self._op(y_BSX, z_BSX, use_in_fp32(self.weight), self.group_size, GATED_NORM_EPSILON)


class MambaMixer(torch.nn.Module):
    """One mixer over ``[S, B, H]`` (``[S / TP, B, H]`` under sequence parallelism, as it comes and as it goes).

    Heads, their groups, the convolution's channels and the gated norm are cut over the tensor-parallel ranks by
    groups of heads; the scan needs no communication. A rank's rows of ``in_proj`` are its cuts of z, x, B, C and dt,
    one after the other.
    """

    def __init__(self, name: str, layer: int, config: TransformerConfig, context: ModelContext) -> None:
        super().__init__()
        tp = context.groups.tp.size
        sizes = mamba_sizes(config, tp)
        self.sizes = sizes.local(tp)
        parts = sizes.in_proj_parts
        self.in_proj = NormColumnParallelLinear(
            f"{name}.in_proj", config.hidden_size, sum(parts), config, context, parts=parts
        )
        specs = mixer_specs(name, sizes, context)
        self.conv1d_weight = create_parameter(specs["conv1d_weight"], context)
        self.conv1d_bias = create_parameter(specs["conv1d_bias"], context)
        self.dt_bias = create_parameter(specs["dt_bias"], context)
        self.A_log = create_parameter(specs["A_log"], context)
        self.D = create_parameter(specs["D"], context)
        self.norm = GatedNorm(specs["norm.weight"], sizes.inner // sizes.groups, context)
        self.out_proj = RowParallelLinear(
            f"{name}.out_proj",
            sizes.inner,
            config.hidden_size,
            context,
            init_std=config.output_init_std,
        )
        self._conv, self._scan = context.ops["causal_conv1d"], context.ops["ssd_scan"]

    def forward(self, x_SBH: torch.Tensor, microbatch: Microbatch, report: StageReport) -> torch.Tensor:
        """The layer's contribution to the residual stream."""
        sizes = self.sizes
        inner, channels = sizes.inner, sum(sizes.conv_parts)
        rows_BSX = self.in_proj(x_SBH).transpose(0, 1)
        z_BSX, conv_BSC, dt_BSN = rows_BSX.split([inner, channels, sizes.heads], dim=-1)
        taps_C1W, bias_C, A_log_N, D_N, dt_bias_N = use_all_in_fp32(
            self.conv1d_weight, self.conv1d_bias, self.A_log, self.D, self.dt_bias
        )
        conv_BSC = self._conv(conv_BSC, taps_C1W.squeeze(1), bias_C)
        inner_BSX, B_BSX, C_BSX = conv_BSC.split(sizes.conv_parts, dim=-1)
        y_BSND = self._scan(
            inner_BSX.unflatten(-1, (sizes.heads, sizes.head_dim)),
            dt_BSN,
            A_log_N,
            B_BSX.unflatten(-1, (sizes.groups, sizes.state)),
            C_BSX.unflatten(-1, (sizes.groups, sizes.state)),
            D_N,
            dt_bias_N=dt_bias_N,
            chunk_size=CHUNK_SIZE,
        )
        gated_BSX = self.norm(y_BSND.flatten(2), z_BSX)
        return self.out_proj(gated_BSX.transpose(0, 1).contiguous())
