"""``ssd_scan`` by mamba-ssm's Triton kernels, in its default and in its deterministic mode.

The code is one; the package chose its launches when it was imported, and how it adds it asks at each call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron.core.ops.availability import on_cuda_with
from megatron.core.ops.launch import power_of_two
from megatron.core.ops.outside import Outside
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.ssd_scan import deterministic

MIN_CHUNK = 16
"""Shortest chunk its products take; the result is that of the same recurrence whatever the chunk."""


@functools.cache
def _package() -> Any:
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")


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
    """Same contract as the reference, for bf16; states between chunks are bf16. Sequences that begin on the way, and
    states before and behind the positions, are left to torch."""
    if not x_BSND.numel() or first_BS is not None or state_BNDK is not None:
        named = {"chunk_size": chunk_size, "first_BS": first_BS, "state_BNDK": state_BNDK}
        return deterministic.ssd_scan(x_BSND, dt_BSN, A_log_N, B_BSGK, C_BSGK, D_N, dt_bias_N=dt_bias_N, **named)
    return _package().mamba_chunk_scan_combined(
        x_BSND,
        dt_BSN,
        -A_log_N.float().exp(),
        B_BSGK,
        C_BSGK,
        max(MIN_CHUNK, power_of_two(chunk_size)),
        D=D_N,
        dt_bias=dt_bias_N,
        dt_softplus=True,
    )


_SOURCES = ("megatron.core.ops.launch", "megatron.core.ops.ssd_scan.deterministic", "megatron.core.ops.outside")

VARIANT = Variant(
    name="mamba_ssm",
    fn=ssd_scan,
    guarantee=on_cuda_with("mamba_ssm", Guarantee.NONE),
    dtypes=frozenset({torch.bfloat16}),
    why="Atomics add the gradients of time steps and decays, and launches are chosen by timing at the first call.",
    sources=_SOURCES,
    outside=Outside(package="mamba_ssm", load=_package, switch="MAMBA_DETERMINISTIC"),
)
DETERMINISTIC = Variant(
    name="mamba_ssm_deterministic",
    fn=ssd_scan,
    guarantee=on_cuda_with("mamba_ssm", Guarantee.RUN_TO_RUN),
    dtypes=frozenset({torch.bfloat16}),
    why="A slot per tile and a sum after it instead of the atomics; one launch per kernel, the cheapest of its list.",
    sources=_SOURCES,
    outside=Outside(
        package="mamba_ssm", load=_package, at_least="2.3.2", switch="MAMBA_DETERMINISTIC", deterministic=True
    ),
)
