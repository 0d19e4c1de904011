"""``ssd_scan`` chunk by chunk: keeps the inputs and one state per chunk, computes each chunk again in the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from megatron.core.contracts.node import Node
from megatron.core.ops.elementwise import softplus
from megatron.core.ops.fixed_order import prefix_sum
from megatron.core.ops.registry import Guarantee, Variant
from megatron.core.ops.rerun import rerun

_Tensors = Sequence[torch.Tensor]


def _chunk(
    per_head: _Tensors, rows: _Tensors, since: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[B, G, N/G, C, D]`` of one chunk and the state ``[B, G, N/G, D, K]`` after it, in fp32.

    ``per_head`` are A_log, dt_bias and D as fp32 ``[G, N/G]``; ``rows`` x, dt, B and C as ``[B, G, N/G or 1, C, ..]``.
    ``since`` ``[B, 1, 1, C]``: where each position's sequence begins, counted from the chunk; below 0: earlier.
    Running sums of decays are kept in fp64, so that their differences are good however far they have run.
    """
    (A_log, dt_bias, D), (x, dt, B, C) = per_head, rows
    length = x.shape[-2]
    step = softplus(dt.float() + dt_bias.unsqueeze(-1))
    running = prefix_sum((-A_log.exp().unsqueeze(-1) * step).double())
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    through = running.float().exp()
    if since is not None:
        later = later | (torch.arange(length, device=x.device) < since.unsqueeze(-1))
        through = through.masked_fill(since >= 0, 0.0)
    between = (running.unsqueeze(-1) - running.unsqueeze(-2)).float().masked_fill(later, float("-inf")).exp()
    x, B, C = x.float(), B.float(), C.float()
    weighted = x * step.unsqueeze(-1)
    carried = C @ state.transpose(-1, -2) * through.unsqueeze(-1)
    y = (C @ B.transpose(-1, -2) * between) @ weighted + carried + x * D[..., None, None]
    added = (weighted * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ B
    return y, state * through[..., -1, None, None] + added


def starts_of(first_BS: torch.Tensor) -> torch.Tensor:
    """int32 ``[B, S]``: where each position's sequence begins; -1 before the first one that begins here."""
    position = torch.arange(first_BS.shape[1], dtype=torch.int32, device=first_BS.device)
    return torch.where(first_BS, position, -1).cummax(dim=1).values if first_BS.numel() else first_BS.int()


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """A view ``[B, G, N/G or 1, S, ...]`` of ``[B, S, N or G, ...]``."""
    split = tensor.unflatten(2, (groups, tensor.shape[2] // groups))
    return split.permute(0, 2, 3, 1, *range(4, split.dim()))


def _ungrouped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 3, 1, 2, *range(4, tensor.dim())).flatten(2, 3)


class _Scan(Node):
    @staticmethod
    def forward(ctx, A_log_N, dt_bias_N, D_N, x_BSND, dt_BSN, B_BSGK, C_BSGK, state_BNDK, first_BS, chunk_size):
        groups = B_BSGK.shape[2]
        per_head = [p.float().view(groups, -1) for p in (A_log_N, dt_bias_N, D_N)]
        rows = [_grouped(t, groups) for t in (x_BSND, dt_BSN, B_BSGK, C_BSGK)]
        state = x_BSND.new_zeros((*rows[0].shape[:3], x_BSND.shape[-1], B_BSGK.shape[-1]), dtype=torch.float32)
        if state_BNDK is not None:
            state = state_BNDK.float().reshape(state.shape)
        starts = None if first_BS is None else starts_of(first_BS)[:, None, None]
        out, before = torch.empty_like(x_BSND, memory_format=torch.contiguous_format), []
        for start in range(0, x_BSND.shape[1], chunk_size):
            before.append(state)
            part = slice(start, start + chunk_size)
            since = None if starts is None else starts[..., part] - start
            y, state = _chunk(per_head, [t[:, :, :, part] for t in rows], since, state)
            out[:, part] = _ungrouped(y)
        ctx.save_for_backward(A_log_N, dt_bias_N, D_N, x_BSND, dt_BSN, B_BSGK, C_BSGK, *before)
        ctx.chunk_size, ctx.starts, ctx.has_state = chunk_size, starts, state_BNDK is not None
        return (out, state.flatten(1, 2).clone()) if ctx.has_state else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BSND, dstate_BNDK=None):
        given, before = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        groups, chunk_size = given[5].shape[2], ctx.chunk_size
        per_head = [p.float().view(groups, -1) for p in given[:3]]
        rows, dy = [_grouped(t, groups) for t in given[3:]], _grouped(dy_BSND, groups)
        dper_head = [torch.zeros_like(p) for p in per_head]
        drows = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[3:]]
        dstate = torch.zeros_like(before[0]) if before else None
        if ctx.has_state:
            dstate = dstate_BNDK.unflatten(1, (groups, -1))
        for i in reversed(range(len(before))):
            part = slice(i * chunk_size, (i + 1) * chunk_size)
            since = None if ctx.starts is None else ctx.starts[..., part] - part.start
            leaves = [t.detach().requires_grad_() for t in (*per_head, *(t[:, :, :, part] for t in rows), before[i])]
            with rerun() as again:
                with torch.enable_grad():
                    y, after = _chunk(leaves[:3], leaves[3:7], since, leaves[7])
                again.in_forward = False
                grads = torch.autograd.grad((y, after), leaves, (dy[:, :, :, part].float(), dstate))
            for total, grad in zip(dper_head, grads[:3], strict=True):
                total.add_(grad)
            for whole, grad in zip(drows, grads[3:7], strict=True):
                whole[:, part] = _ungrouped(grad)
            dstate = grads[7]
        dparams = [d.view(-1).to(p.dtype) for d, p in zip(dper_head, given[:3], strict=True)]
        return *dparams, *drows, dstate.flatten(1, 2) if ctx.has_state else None, None, None


def require_shapes(
    x_BSND: torch.Tensor, B_BSGK: torch.Tensor, first_BS: torch.Tensor | None, state_BNDK: torch.Tensor | None
) -> None:
    """What says where sequences begin, and the state before, fit ``x``.

    Raises:
        ValueError: one does not.
    """
    batch, length, heads, width = x_BSND.shape
    for name, given, shape in (
        ("first_BS", first_BS, (batch, length)),
        ("state_BNDK", state_BNDK, (batch, heads, width, B_BSGK.shape[-1])),
    ):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name} is {list(given.shape)}, it has to be {list(shape)}")


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
    """See the reference. Parameter gradients add over chunks from the last to the first."""
    require_shapes(x_BSND, B_BSGK, first_BS, state_BNDK)
    return _Scan.apply(A_log_N, dt_bias_N, D_N, x_BSND, dt_BSN, B_BSGK, C_BSGK, state_BNDK, first_BS, chunk_size)


VARIANT = Variant(
    name="deterministic",
    fn=ssd_scan,
    guarantee={"cpu": Guarantee.RUN_TO_RUN, "cuda": Guarantee.RUN_TO_RUN},
    why="BLAS products of fixed shapes, running sums by doubling, one chunk after the other; no atomics.",
    sources=("megatron.core.ops.elementwise", "megatron.core.ops.fixed_order"),
)
