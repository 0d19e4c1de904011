"""``ssd_scan`` by chunks in Triton: three kernels forward, eight backward, all with one writer per output.

States at chunk borders are made again in the backward instead of being kept: they are the largest intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.contracts.node import Node
from megatron.core.ops.column_sum import column_sum
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.launch import Config, Launch, cdiv, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.ssd_scan.deterministic import require_shapes, starts_of
from megatron.core.ops.ssd_scan.kernels.chunk_decay import chunk_decay_bwd_kernel, chunk_decay_fwd_kernel
from megatron.core.ops.ssd_scan.kernels.chunk_scan import chunk_scan_fwd_kernel
from megatron.core.ops.ssd_scan.kernels.chunk_scan_bwd import chunk_scan_bwd_states_kernel, chunk_scan_bwd_values_kernel
from megatron.core.ops.ssd_scan.kernels.chunk_states import chunk_states_kernel

MIN_TILE = 16
MIN_STATE_PROGRAMS = 128


def _states_rule(sequences: int, width: int, num_state: int, _: int) -> Config:
    """The recurrence over chunks cuts K finer, down to 32 columns, until there are MIN_STATE_PROGRAMS programs."""
    whole_k, block_d = max(MIN_TILE, power_of_two(num_state)), min(64, max(MIN_TILE, power_of_two(width)))
    block_k = min(128, whole_k)
    while block_k > 32 and sequences * (whole_k // block_k) < MIN_STATE_PROGRAMS:
        block_k //= 2
    return {"BLOCK_D": block_d, "BLOCK_K": block_k, "num_warps": 8, "num_stages": 3}


def _bwd_states_rule(num_state: int, _: int) -> Config:
    """64 columns of K to a program."""
    return {"BLOCK_K": min(64, max(MIN_TILE, power_of_two(num_state))), "num_warps": 4, "num_stages": 3}


def _warps_rule(*_: int) -> Config:
    return {"num_warps": 4, "num_stages": 3}


WARPS = {"num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
CHUNK = Launch(
    kernel="ssd_scan_chunk",
    rule=lambda size: {"L": 64 if size == 2 else 32},
    choices={"L": (16, 32, 64, 128)},
    new_bits=frozenset({"L"}),
)
"""Positions per chunk at most, whatever ``chunk_size`` allows: what fits the registers of one program. By element size,
which is the last size of the others too."""
DECAY = Launch(
    kernel="ssd_scan_decay",
    rule=lambda _: {"BLOCK_N": 16, "num_warps": 4},
    choices={"BLOCK_N": (4, 8, 16, 32), "num_warps": (1, 2, 4)},
    new_bits=frozenset({"BLOCK_N", "num_warps"}),
)
"""By heads."""
STATES = Launch(
    kernel="ssd_scan_states", rule=_states_rule, choices={"BLOCK_D": (32, 64), "BLOCK_K": (32, 64, 128), **WARPS}
)
"""By heads of all samples, head width and state."""
SCAN = Launch(kernel="ssd_scan_fwd", rule=_warps_rule, choices=WARPS)
BWD_VALUES = Launch(kernel="ssd_scan_bwd_values", rule=_warps_rule, choices=WARPS, new_bits=frozenset({"num_warps"}))
"""These two by head width and state."""
BWD_STATES = Launch(
    kernel="ssd_scan_bwd_states",
    rule=_bwd_states_rule,
    choices={"BLOCK_K": (32, 64, 128), **WARPS},
    new_bits=frozenset({"BLOCK_K", "num_warps"}),
)
"""By state: a program takes BLOCK_K columns of it."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of one call, and the tiles that follow from them."""

    batch: int
    length: int
    heads: int
    width: int
    groups: int
    num_state: int
    chunk: int
    chunks: int
    block_d: int
    block_k: int

    @property
    def counts(self) -> tuple[int, ...]:
        """As all kernels but those of the decay take them."""
        return self.length, self.heads, self.heads // self.groups, self.width, self.num_state, self.chunks

    def decay_grid(self, block_n: int) -> tuple[int, int, int]:
        return self.chunks, cdiv(self.heads, block_n), self.batch


def _sizes(x_BSND: torch.Tensor, B_BSGK: torch.Tensor, chunk_size: int) -> _Sizes:
    batch, length, heads, width = x_BSND.shape
    groups, num_state = B_BSGK.shape[2:]
    longest = CHUNK.config(x_BSND.device, x_BSND.element_size())["L"]
    chunk = min(longest, max(MIN_TILE, power_of_two(chunk_size)))
    block_d, block_k = max(MIN_TILE, power_of_two(width)), max(MIN_TILE, power_of_two(num_state))
    return _Sizes(batch, length, heads, width, groups, num_state, chunk, cdiv(length, chunk), block_d, block_k)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides of the first three dims of x, B and C, as the kernels take them."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _decay(
    sizes: _Sizes, dt_BSN: torch.Tensor, dt_bias_N: torch.Tensor, A_log_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Time steps and running log decays, [B, N, chunks * L] each."""
    padded = sizes.chunks * sizes.chunk
    work = dt_BSN.new_empty(2, sizes.batch, sizes.heads, padded, dtype=torch.float32)
    step, cum = work.unbind()
    launch = DECAY.config(dt_BSN.device, sizes.heads)
    run_kernel(
        chunk_decay_fwd_kernel, sizes.decay_grid(launch["BLOCK_N"]),
        dt_BSN, dt_bias_N, A_log_N, step, cum, sizes.length, sizes.heads, padded, *dt_BSN.stride(),
        L=sizes.chunk, **launch,
    )  # fmt: skip
    return step, cum


def _decay_backward(
    sizes: _Sizes,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    dwork: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Gradient of dt; partials of A_log's and the bias's gradients go to ``parts[1]`` and ``parts[2]``."""
    dt_BSN, dt_bias_N, A_log_N = inputs
    ddt_BSN = torch.empty_like(dt_BSN, memory_format=torch.contiguous_format)
    launch = DECAY.config(dt_BSN.device, sizes.heads)
    run_kernel(
        chunk_decay_bwd_kernel, sizes.decay_grid(launch["BLOCK_N"]),
        dt_BSN, dt_bias_N, A_log_N, step, dwork[0], dwork[1], ddt_BSN, parts[1], parts[2], sizes.length, sizes.heads,
        step.shape[-1], *dt_BSN.stride(), step.numel(),
        L=sizes.chunk, SLOTS=len(dwork) - 1, **launch,
    )  # fmt: skip
    return ddt_BSN


def _states(
    sizes: _Sizes,
    x_BSND: torch.Tensor,
    B_BSGK: torch.Tensor,
    work: Sequence[torch.Tensor],
    *,
    start_BS: torch.Tensor | None,
    first_BNDK: torch.Tensor | None,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[B, chunks, N, D, K] in the activation type: states before each chunk; reverse: gradients after each chunk. Then,
    where the recurrence begins with ``first_BNDK``, what it ends with."""
    sequences = sizes.batch * sizes.heads
    launch = STATES.config(x_BSND.device, sequences, sizes.width, sizes.num_state, x_BSND.element_size())
    shape = (sizes.batch, sizes.chunks, sizes.heads, sizes.width, sizes.num_state)
    states = x_BSND.new_empty(shape)
    last_BNDK = None if first_BNDK is None else torch.empty_like(first_BNDK)
    tiles = cdiv(sizes.width, launch["BLOCK_D"]) * cdiv(sizes.num_state, launch["BLOCK_K"])
    run_kernel(
        chunk_states_kernel, (sizes.heads, tiles, sizes.batch),
        x_BSND, B_BSGK, *work, states, start_BS, first_BNDK, last_BNDK, *sizes.counts, *_strides(x_BSND, B_BSGK),
        L=sizes.chunk, REVERSE=reverse, RESETS=start_BS is not None, ENDS=first_BNDK is not None, **launch,
    )  # fmt: skip
    return states, last_BNDK


class _SSDScan(Node):
    @staticmethod
    def forward(ctx, x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, state_BNDK, start_BS, chunk_size: int):
        sizes = _sizes(x_BSND, B_BSGK, chunk_size)
        y_BSND = torch.empty_like(x_BSND, memory_format=torch.contiguous_format)
        ctx.sizes, ctx.has_state = sizes, state_BNDK is not None
        given = (x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, state_BNDK, start_BS)
        if not y_BSND.numel():
            ctx.save_for_backward(*given)
            return y_BSND if state_BNDK is None else (y_BSND, state_BNDK.clone())
        work = _decay(sizes, dt_BSN, dt_bias_N, A_log_N)
        states, last_BNDK = _states(
            sizes, x_BSND, B_BSGK, work, start_BS=start_BS, first_BNDK=state_BNDK, reverse=False
        )
        run_kernel(
            chunk_scan_fwd_kernel, (sizes.chunks, sizes.groups, sizes.batch),
            x_BSND, B_BSGK, C_BSGK, D_N, *work, states, y_BSND, start_BS,
            *sizes.counts, *_strides(x_BSND, B_BSGK, C_BSGK),
            L=sizes.chunk, BLOCK_D=sizes.block_d, BLOCK_K=sizes.block_k, RESETS=start_BS is not None,
            **SCAN.config(x_BSND.device, sizes.width, sizes.num_state, x_BSND.element_size()),
        )  # fmt: skip
        ctx.save_for_backward(*given, *work)
        return y_BSND if state_BNDK is None else (y_BSND, last_BNDK)

    @staticmethod
    def backward(ctx, dy_BSND: torch.Tensor, dlast_BNDK: torch.Tensor | None = None):
        if not dy_BSND.numel():
            return *(torch.zeros_like(saved) for saved in ctx.saved_tensors[:7]), dlast_BNDK, None, None
        x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, state_BNDK, start_BS, step, cum = ctx.saved_tensors
        sizes, dy_BSND = ctx.sizes, dy_BSND.contiguous()
        launch = BWD_STATES.config(x_BSND.device, sizes.num_state, x_BSND.element_size())
        k_tiles = cdiv(sizes.num_state, launch["BLOCK_K"])
        # The gradient of step; then that of the log decays: what needs no state, and one part per tile of K.
        dwork = step.new_empty(2 + k_tiles, *step.shape).unbind()
        pairs = x_BSND.new_empty(sizes.batch, sizes.chunks, sizes.groups, sizes.chunk, sizes.chunk)
        parts = step.new_empty(3, sizes.batch * sizes.chunks, sizes.heads).unbind()
        dx_BSND, dB_BSGK, dC_BSGK = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x_BSND, B_BSGK, C_BSGK)
        )
        dlast_BNDK = dlast_BNDK.contiguous() if ctx.has_state else None
        dstates, dstate_BNDK = _states(
            sizes, dy_BSND, C_BSGK, (step, cum), start_BS=start_BS, first_BNDK=dlast_BNDK, reverse=True
        )
        counts, strides = sizes.counts, _strides(x_BSND, B_BSGK, C_BSGK)
        run_kernel(
            chunk_scan_bwd_values_kernel, (sizes.chunks, sizes.groups, sizes.batch),
            x_BSND, B_BSGK, C_BSGK, D_N, step, cum, dstates, dy_BSND, dx_BSND, parts[0], dwork[0], dwork[1], pairs,
            start_BS, *counts, *strides,
            L=sizes.chunk, BLOCK_D=sizes.block_d, BLOCK_K=sizes.block_k, RESETS=start_BS is not None,
            **BWD_VALUES.config(x_BSND.device, sizes.width, sizes.num_state, x_BSND.element_size()),
        )  # fmt: skip
        states, _ = _states(sizes, x_BSND, B_BSGK, (step, cum), start_BS=start_BS, first_BNDK=state_BNDK, reverse=False)
        run_kernel(
            chunk_scan_bwd_states_kernel, (sizes.chunks * k_tiles, sizes.groups, sizes.batch),
            x_BSND, B_BSGK, C_BSGK, step, cum, states, dstates, dy_BSND, dB_BSGK, dC_BSGK, dwork[2], pairs,
            start_BS, *counts, *strides, step.numel(),
            L=sizes.chunk, BLOCK_D=sizes.block_d, RESETS=start_BS is not None, **launch,
        )  # fmt: skip
        ddt_BSN = _decay_backward(sizes, (dt_BSN, dt_bias_N, A_log_N), step, dwork, parts)
        dD, dA_log, dbias = (column_sum(part) for part in parts)
        params = (dA_log.to(A_log_N.dtype), dD.to(D_N.dtype), dbias.to(dt_bias_N.dtype))
        return dx_BSND, ddt_BSN, params[0], dB_BSGK, dC_BSGK, params[1], params[2], dstate_BNDK, None, None


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def ssd_scan(
    x_BSND: torch.Tensor,
    dt_BSN: torch.Tensor,
    A_log_N: torch.Tensor,
    B_BSGK: torch.Tensor,
    C_BSGK: torch.Tensor,
    D_N: torch.Tensor,
    *,
    dt_bias_N: torch.Tensor,
    chunk_size: int,
    first_BS: torch.Tensor | None = None,
    state_BNDK: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference; ``chunk_size`` bounds the chunks used here. Slices are read in place."""
    require_shapes(x_BSND, B_BSGK, first_BS, state_BNDK)
    params = (A_log_N.contiguous(), D_N.contiguous(), dt_bias_N.contiguous())
    x_BSND, B_BSGK, C_BSGK = _adjacent(x_BSND), _adjacent(B_BSGK), _adjacent(C_BSGK)
    start_BS = None if first_BS is None else starts_of(first_BS)
    state_BNDK = None if state_BNDK is None else state_BNDK.float().contiguous()
    return _SSDScan.apply(
        x_BSND, dt_BSN, params[0], B_BSGK, C_BSGK, params[1], params[2], state_BNDK, start_BS, chunk_size
    )


VARIANT = Variant(
    name="deterministic_triton",
    fn=ssd_scan,
    guarantee={"cuda": Guarantee.BATCH},
    why="One writer per output: a program has all heads that share a B and C; chunks pass states in order; no atomics.",
    sources=(
        "megatron.core.ops.ssd_scan.deterministic",
        "megatron.core.ops.ssd_scan.kernels.chunk_decay",
        "megatron.core.ops.ssd_scan.kernels.chunk_states",
        "megatron.core.ops.ssd_scan.kernels.chunk_scan",
        "megatron.core.ops.ssd_scan.kernels.chunk_scan_bwd",
        "megatron.core.ops.column_sum",
        "megatron.core.ops.direct_launch",
        "megatron.core.ops.launch",
    ),
)
