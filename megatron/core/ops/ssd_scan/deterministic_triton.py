"""``ssd_scan`` by chunks in Triton: three kernels forward, eight backward, all with one writer per output.

States at chunk borders are made again in the backward instead of being kept: they are the largest intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from megatron.core.ops.column_sum import column_sum
from megatron.core.ops.launch import Config, Launch, power_of_two
from megatron.core.ops.registry import Guarantee, Variant
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

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.length, self.chunk)

    @property
    def block_d(self) -> int:
        return max(MIN_TILE, power_of_two(self.width))

    @property
    def block_k(self) -> int:
        return max(MIN_TILE, power_of_two(self.num_state))

    @property
    def counts(self) -> dict[str, int]:
        return {
            "length": self.length,
            "heads": self.heads,
            "heads_per_group": self.heads // self.groups,
            "width": self.width,
            "num_state": self.num_state,
            "chunks": self.chunks,
        }

    @property
    def scan_tiles(self) -> dict[str, int]:
        return {"L": self.chunk, "BLOCK_D": self.block_d, "BLOCK_K": self.block_k}

    def decay_grid(self, block_n: int) -> tuple[int, int, int]:
        return self.chunks, triton.cdiv(self.heads, block_n), self.batch


def _sizes(x_BSND: torch.Tensor, B_BSGK: torch.Tensor, chunk_size: int) -> _Sizes:
    batch, length, heads, width = x_BSND.shape
    longest = CHUNK.config(x_BSND.device, x_BSND.element_size())["L"]
    chunk = min(longest, max(MIN_TILE, power_of_two(chunk_size)))
    return _Sizes(batch, length, heads, width, B_BSGK.shape[2], B_BSGK.shape[3], chunk)


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Strides of the first three dims as the kernels name them: x_b, x_s, x_n; B_b, B_s, B_g; ..."""
    out: dict[str, int] = {}
    for name, tensor in tensors.items():
        third = "n" if name == "x" else "g"
        out.update(zip((f"{name}_b", f"{name}_s", f"{name}_{third}"), tensor.stride(), strict=False))
    return out


def _decay(sizes: _Sizes, dt_BSN: torch.Tensor, dt_bias_N: torch.Tensor, A_log_N: torch.Tensor) -> torch.Tensor:
    """[2, B, N, chunks * L]: time steps and running log decays."""
    padded = sizes.chunks * sizes.chunk
    work = torch.empty(2, sizes.batch, sizes.heads, padded, dtype=torch.float32, device=dt_BSN.device)
    launch = DECAY.config(dt_BSN.device, sizes.heads)
    chunk_decay_fwd_kernel[sizes.decay_grid(launch["BLOCK_N"])](
        dt_ptr=dt_BSN,
        bias_ptr=dt_bias_N,
        A_log_ptr=A_log_N,
        step_ptr=work[0],
        cum_ptr=work[1],
        length=sizes.length,
        heads=sizes.heads,
        padded=padded,
        b_stride=dt_BSN.stride(0),
        s_stride=dt_BSN.stride(1),
        n_stride=dt_BSN.stride(2),
        L=sizes.chunk,
        **launch,
    )
    return work


def _decay_backward(
    sizes: _Sizes,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    work: torch.Tensor,
    dwork: torch.Tensor,
    parts: torch.Tensor,
) -> torch.Tensor:
    """Gradient of dt; partials of A_log's and the bias's gradients go to ``parts[1]`` and ``parts[2]``."""
    dt_BSN, dt_bias_N, A_log_N = inputs
    ddt_BSN = torch.empty(dt_BSN.shape, dtype=dt_BSN.dtype, device=dt_BSN.device)
    launch = DECAY.config(dt_BSN.device, sizes.heads)
    chunk_decay_bwd_kernel[sizes.decay_grid(launch["BLOCK_N"])](
        dt_ptr=dt_BSN,
        bias_ptr=dt_bias_N,
        A_log_ptr=A_log_N,
        step_ptr=work[0],
        dstep_ptr=dwork[0],
        ddecay_ptr=dwork[1],
        ddt_ptr=ddt_BSN,
        dA_log_ptr=parts[1],
        dbias_ptr=parts[2],
        length=sizes.length,
        heads=sizes.heads,
        padded=work.shape[-1],
        b_stride=dt_BSN.stride(0),
        s_stride=dt_BSN.stride(1),
        n_stride=dt_BSN.stride(2),
        L=sizes.chunk,
        slot=work[0].numel(),
        SLOTS=dwork.shape[0] - 1,
        **launch,
    )
    return ddt_BSN


def _states(
    sizes: _Sizes, x_BSND: torch.Tensor, B_BSGK: torch.Tensor, work: torch.Tensor, *, reverse: bool
) -> torch.Tensor:
    """[B, chunks, N, D, K] in the activation type: states before each chunk; reverse: gradients after each chunk."""
    sequences = sizes.batch * sizes.heads
    launch = STATES.config(x_BSND.device, sequences, sizes.width, sizes.num_state, x_BSND.element_size())
    shape = (sizes.batch, sizes.chunks, sizes.heads, sizes.width, sizes.num_state)
    states = torch.empty(shape, dtype=x_BSND.dtype, device=x_BSND.device)
    tiles = triton.cdiv(sizes.width, launch["BLOCK_D"]) * triton.cdiv(sizes.num_state, launch["BLOCK_K"])
    chunk_states_kernel[(sizes.heads, tiles, sizes.batch)](
        x_ptr=x_BSND,
        B_ptr=B_BSGK,
        step_ptr=work[0],
        cum_ptr=work[1],
        states_ptr=states,
        **sizes.counts,
        **_strides(x=x_BSND, B=B_BSGK),
        L=sizes.chunk,
        REVERSE=reverse,
        **launch,
    )
    return states


class _SSDScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, chunk_size: int) -> torch.Tensor:
        sizes = _sizes(x_BSND, B_BSGK, chunk_size)
        y_BSND = torch.empty(x_BSND.shape, dtype=x_BSND.dtype, device=x_BSND.device)
        ctx.sizes = sizes
        if not y_BSND.numel():
            ctx.save_for_backward(x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N)
            return y_BSND
        work = _decay(sizes, dt_BSN, dt_bias_N, A_log_N)
        chunk_scan_fwd_kernel[(sizes.chunks, sizes.groups, sizes.batch)](
            x_ptr=x_BSND,
            B_ptr=B_BSGK,
            C_ptr=C_BSGK,
            D_ptr=D_N,
            step_ptr=work[0],
            cum_ptr=work[1],
            states_ptr=_states(sizes, x_BSND, B_BSGK, work, reverse=False),
            y_ptr=y_BSND,
            **sizes.counts,
            **_strides(x=x_BSND, B=B_BSGK, C=C_BSGK),
            **sizes.scan_tiles,
            **SCAN.config(x_BSND.device, sizes.width, sizes.num_state, x_BSND.element_size()),
        )
        ctx.save_for_backward(x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, work)
        return y_BSND

    @staticmethod
    def backward(ctx, dy_BSND: torch.Tensor):
        if not dy_BSND.numel():
            return *(torch.zeros_like(saved) for saved in ctx.saved_tensors), None
        x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N, work = ctx.saved_tensors
        sizes, dy_BSND = ctx.sizes, dy_BSND.contiguous()
        launch = BWD_STATES.config(x_BSND.device, sizes.num_state, x_BSND.element_size())
        k_tiles = triton.cdiv(sizes.num_state, launch["BLOCK_K"])
        # The gradient of step; then that of the log decays: what needs no state, and one part per tile of K.
        dwork = work.new_empty(2 + k_tiles, *work.shape[1:])
        pairs = x_BSND.new_empty(sizes.batch, sizes.chunks, sizes.groups, sizes.chunk, sizes.chunk)
        parts = x_BSND.new_empty(3, sizes.batch * sizes.chunks, sizes.heads, dtype=torch.float32)
        dx_BSND, dB_BSGK, dC_BSGK = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x_BSND, B_BSGK, C_BSGK)
        )
        both = {
            "x_ptr": x_BSND,
            "B_ptr": B_BSGK,
            "C_ptr": C_BSGK,
            "step_ptr": work[0],
            "cum_ptr": work[1],
            "dstates_ptr": _states(sizes, dy_BSND, C_BSGK, work, reverse=True),
            "dy_ptr": dy_BSND,
            "pairs_ptr": pairs,
            **sizes.counts,
            **_strides(x=x_BSND, B=B_BSGK, C=C_BSGK),
            "L": sizes.chunk,
            "BLOCK_D": sizes.block_d,
        }
        chunk_scan_bwd_values_kernel[(sizes.chunks, sizes.groups, sizes.batch)](
            D_ptr=D_N,
            dx_ptr=dx_BSND,
            dD_ptr=parts[0],
            dstep_ptr=dwork[0],
            ddecay_ptr=dwork[1],
            BLOCK_K=sizes.block_k,
            **both,
            **BWD_VALUES.config(x_BSND.device, sizes.width, sizes.num_state, x_BSND.element_size()),
        )
        chunk_scan_bwd_states_kernel[(sizes.chunks * k_tiles, sizes.groups, sizes.batch)](
            states_ptr=_states(sizes, x_BSND, B_BSGK, work, reverse=False),
            dB_ptr=dB_BSGK,
            dC_ptr=dC_BSGK,
            ddecay_ptr=dwork[2],
            slot=work[0].numel(),
            **both,
            **launch,
        )
        ddt_BSN = _decay_backward(sizes, (dt_BSN, dt_bias_N, A_log_N), work, dwork, parts)
        dD, dA_log, dbias = (column_sum(part) for part in parts)
        params = (dA_log.to(A_log_N.dtype), dD.to(D_N.dtype), dbias.to(dt_bias_N.dtype))
        return dx_BSND, ddt_BSN, params[0], dB_BSGK, dC_BSGK, params[1], params[2], None


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
) -> torch.Tensor:
    """Same contract as the reference; ``chunk_size`` bounds the chunks used here. Slices are read in place."""
    params = (A_log_N.contiguous(), D_N.contiguous(), dt_bias_N.contiguous())
    x_BSND, B_BSGK, C_BSGK = _adjacent(x_BSND), _adjacent(B_BSGK), _adjacent(C_BSGK)
    return _SSDScan.apply(x_BSND, dt_BSN, params[0], B_BSGK, C_BSGK, params[1], params[2], chunk_size)


VARIANT = Variant(
    name="deterministic_triton",
    fn=ssd_scan,
    guarantee={"cuda": Guarantee.BATCH},
    why="One writer per output: a program has all heads that share a B and C; chunks pass states in order; no atomics.",
    sources=(
        "megatron.core.ops.ssd_scan.kernels.chunk_decay",
        "megatron.core.ops.ssd_scan.kernels.chunk_states",
        "megatron.core.ops.ssd_scan.kernels.chunk_scan",
        "megatron.core.ops.ssd_scan.kernels.chunk_scan_bwd",
        "megatron.core.ops.column_sum",
        "megatron.core.ops.launch",
    ),
)
