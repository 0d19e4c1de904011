"""The definition of ``ssd_scan``."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from megatron.core.ops.elementwise import softplus
from megatron.core.ops.fixed_order import prefix_sum
from megatron.core.ops.precision import widen
from megatron.core.ops.registry import Guarantee, Variant


def decay_between(log_decay: torch.Tensor) -> torch.Tensor:
    """``[..., l, s]``: the product of decays after position s up to position l, 0 above the diagonal.

    Each column is summed from its own start, so nothing cancels, and the mask comes before the exponential.
    """
    length = log_decay.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    # [..., s, l]: column l counts towards row s where l > s.
    terms = log_decay.unsqueeze(-2).masked_fill(~lower.t().triu(1), 0.0)
    return prefix_sum(terms).transpose(-1, -2).masked_fill(~lower, float("-inf")).exp()


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
    """Mamba-2's scan by chunks (Dao and Gu, arXiv 2405.21060, section 6), in fp32; in the type of ``x_BSND``.

    ``first_BS`` (bool) is true where a sequence begins, which sees nothing of what lies before it if that is finite.
    With the state ``state_BNDK`` before the first position (fp32) the one behind the last is a second result.
    """
    length, groups = x_BSND.shape[1], B_BSGK.shape[2]
    missing = max(-length % chunk_size, chunk_size - length)

    def chunked(wide: torch.Tensor) -> torch.Tensor:
        """``[B, S, heads or groups, ...]`` to ``[B, G, N/G or 1, chunk, position, ...]``, zeros at the end."""
        wide = pad(wide, (0, 0) * (wide.dim() - 2) + (0, missing))
        wide = wide.unflatten(1, (-1, chunk_size)).unflatten(3, (groups, -1))
        return wide.permute(0, 3, 4, 1, 2, *range(5, wide.dim()))

    wide_BSND, dt = widen(x_BSND), softplus(widen(dt_BSN) + widen(dt_bias_N))
    # Padding the products, not dt, keeps 0 * inf out where A_log is extreme.
    decay = -widen(A_log_N).exp() * dt
    log_decay = chunked(decay if first_BS is None else decay.masked_fill(first_BS.unsqueeze(-1), float("-inf")))
    x = chunked(wide_BSND * dt.unsqueeze(-1))
    B, C = chunked(widen(B_BSGK)), chunked(widen(C_BSGK))

    running = prefix_sum(log_decay)
    between = decay_between(log_decay)
    inside = (C @ B.transpose(-1, -2) * between) @ x
    # What each chunk adds to the state [D, K] at its end, and what the states before it give to its positions.
    added = (x * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ B
    state, before = torch.zeros_like(added[..., 0, :, :]), []
    if state_BNDK is not None:
        state = state + widen(state_BNDK).unflatten(1, (groups, -1))
    for add, total in zip(added.unbind(3), running[..., -1].unbind(3), strict=True):
        before.append(state)
        state = state * total.exp()[..., None, None] + add
    carried = C @ torch.stack(before, dim=3).transpose(-1, -2) * running.exp().unsqueeze(-1)

    y = (inside + carried).permute(0, 3, 4, 1, 2, 5).flatten(3, 4).flatten(1, 2)[:, :length]
    y = (y + wide_BSND * widen(D_N).unsqueeze(-1)).to(x_BSND.dtype)
    return y if state_BNDK is None else (y, state.flatten(1, 2))


VARIANT = Variant(
    name="reference",
    fn=ssd_scan,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes, running sums by doubling, chunks one after the other; no atomics.",
    sources=("megatron.core.ops.elementwise", "megatron.core.ops.fixed_order"),
)
