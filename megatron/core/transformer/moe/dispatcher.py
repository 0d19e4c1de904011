"""Moving tokens to the ranks of their experts and back, in an order that does not depend on how they travel.

A rank writes one row per (token, chosen expert, expert-tensor rank), sorted by receiving rank, expert, position. One
all-to-all over the expert group moves them; the receiver sorts by (expert, sending rank, position), and sending ranks
ascend as logical shards and tensor-parallel ranks do. The way back is the inverse. A token's returned copies are added
in fp32 over (expert id, expert-tensor rank) ascending and rounded once; so are its gradient copies. Every rank enters
every exchange, also one that has nothing to send or receive.

``allgather`` differs on the way to the experts only: every rank gets all tokens of the group and picks the rows of its
own experts, which end up in the same places. How much travels depends on shapes alone, and the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.config.transformer import TransformerConfig
from megatron.core.contracts.node import Node
from megatron.core.ops.reading import start_reading
from megatron.core.process_groups.collectives import all_gather, all_to_all, all_to_all_rows
from megatron.core.process_groups.groups import Group
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.transformer.moe.router import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Plan of one micro-batch's exchange on one rank.

    ``row_of_TJ`` is the row to send of each of a token's copies, J = (choice, expert-tensor rank); ``ends_E`` (int32)
    is where the rows of each local expert end after the exchange. ``sort`` orders received rows by expert, ``unsort``
    undoes it; a group of one needs neither. With ``allgather``, ``place_of_AJ`` says for every copy of all A tokens of
    the group which of this rank's rows it becomes, or -1 where its expert is on another rank.
    """

    group: Group
    row_of_TJ: torch.Tensor
    sent: list[int]
    received: list[int]
    ends_E: torch.Tensor
    sort: torch.Tensor | None = None
    unsort: torch.Tensor | None = None
    place_of_AJ: torch.Tensor | None = None


def rows_to_send(routing: Routing, ep: int, etp: int) -> torch.Tensor:
    """``[T, k * etp]``: the row of every copy when rows are sorted by (owner of the expert, expert-tensor rank,
    expert, token); -1 for choices that are not kept. An expert has ``rows_E`` rows, of which the last may be unused."""
    ids_Tk, rows_E, kept_Tk, taken_TE = routing.ids_Tk, routing.rows_E, routing.kept_Tk, routing.taken_TE
    # One scan over all experts' tokens: one down the columns is a hundred times slower on a GPU.
    taken_ET = taken_TE.t().to(torch.int64, memory_format=torch.contiguous_format)
    up_to_ET = taken_ET.view(-1).cumsum(0).view_as(taken_ET)
    row_Tk = up_to_ET.gather(0, ids_Tk.t()).t().contiguous() - 1
    if kept_Tk is not None:
        unused_E = rows_E - taken_ET.sum(dim=1)
        row_Tk = torch.where(kept_Tk, row_Tk + (unused_E.cumsum(0) - unused_E)[ids_Tk], -1)
    if etp == 1:
        return row_Tk
    per_owner = rows_E.view(ep, -1).sum(dim=1)
    owner_Tk = ids_Tk // (rows_E.shape[0] // ep)
    first_Tk = (per_owner.cumsum(0) - per_owner)[owner_Tk]
    ranks = torch.arange(etp, device=ids_Tk.device)
    skipped_TkR = first_Tk.unsqueeze(-1) * (etp - 1) + ranks * per_owner[owner_Tk].unsqueeze(-1)
    return torch.where(row_Tk.unsqueeze(-1) < 0, -1, row_Tk.unsqueeze(-1) + skipped_TkR).flatten(1)


class Sorting:
    """Permutations between rows as they are received, (sender, expert, position), and as experts need them, (expert,
    sender, position)."""

    def __init__(self, senders: int, experts: int, device: torch.device) -> None:
        # The blocks of rows of one sender and one expert, all as wanted, then all as they come: where each is among
        # the counts, and where it is in the other half.
        number = torch.arange(senders * experts, device=device)
        wanted, come = number.view(senders, experts).t().flatten(), number.view(experts, senders).t().flatten()
        self._place, self._opposite = torch.cat((wanted, number)), torch.cat((wanted + number.numel(), come))

    def start(self, count_SE: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """``count_SE`` counts received rows by sender and expert. Call the result with the number of all rows: it
        returns the permutation that sorts them for the experts, and its inverse."""
        count = count_SE.take(self._place)
        start = count.view(2, -1).cumsum(dim=1).view(-1) - count
        shift = start.take(self._opposite) - start

        def orders(total: int) -> tuple[torch.Tensor, torch.Tensor]:
            by_row = torch.repeat_interleave(shift, count, output_size=2 * total).view(2, total)
            sort, unsort = (by_row + torch.arange(total, device=by_row.device)).unbind()
            return sort, unsort

        return orders


def _outward(rows: torch.Tensor, plan: Exchange) -> torch.Tensor:
    if plan.sort is None:  # rows of one sender are sorted by expert already
        return rows.view_as(rows)
    return all_to_all_rows(plan.group, rows, plan.sent, plan.received).index_select(0, plan.sort)


def _homeward(rows: torch.Tensor, plan: Exchange) -> torch.Tensor:
    if plan.unsort is None:
        return rows.view_as(rows)
    return all_to_all_rows(plan.group, rows.index_select(0, plan.unsort), plan.received, plan.sent)


class _ToExperts(Node):
    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, weight_R1: torch.Tensor, plan: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.plan = plan
        return _outward(rows_RH, plan), _outward(weight_R1, plan)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor, grad_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return _homeward(grad_RH, ctx.plan), _homeward(grad_R1, ctx.plan), None


class _FromExperts(Node):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, plan: Exchange) -> torch.Tensor:
        ctx.plan = plan
        return _homeward(rows, plan)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _outward(grad, ctx.plan), None


@dataclass(frozen=True, slots=True)
class _Ops:
    permute: Callable[..., torch.Tensor]
    unpermute: Callable[..., torch.Tensor]


class _FromEveryone(Node):
    """Gather ``x`` from all members and keep the rows of this rank's experts; gradients return as rows do."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, row_of_TJ: torch.Tensor, plan: Exchange, ops: _Ops) -> torch.Tensor:
        ctx.row_of_TJ, ctx.plan, ctx.ops = row_of_TJ, plan, ops
        every_AH = all_gather(plan.group, x_TH).flatten(0, 1)
        return ops.permute(every_AH, plan.place_of_AJ.view(every_AH.shape[0], -1), sum(plan.received))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.ops.unpermute(_homeward(grad, ctx.plan), ctx.row_of_TJ), None, None, None


def places_here(rows_STJ: torch.Tensor, count_SR: torch.Tensor, rank: int, unsort: torch.Tensor) -> torch.Tensor:
    """``[S * T, J]``: where the copies of all senders' tokens go among the sorted rows of member ``rank``, or -1.

    ``rows_STJ`` is every sender's ``rows_to_send``, ``count_SR`` how many of them go to each receiver.
    """
    first_S = (count_SR.cumsum(1) - count_SR)[:, rank]
    here_S = count_SR[:, rank]
    received_S = here_S.cumsum(0) - here_S
    row_STJ = rows_STJ - first_S.view(-1, 1, 1)
    mine_STJ = (row_STJ >= 0) & (row_STJ < here_S.view(-1, 1, 1))
    # A column more, so that there is something to look up where nothing is received.
    order = torch.nn.functional.pad(unsort, (0, 1), value=-1)
    row_STJ = torch.where(mine_STJ, row_STJ + received_S.view(-1, 1, 1), unsort.numel())
    return order[row_STJ].flatten(0, 1)


def _alone(group: Group, row_of_TJ: torch.Tensor, ends_E: torch.Tensor, total: int) -> Exchange:
    """The plan of a group of one."""
    return Exchange(group=group, row_of_TJ=row_of_TJ, sent=[total], received=[total], ends_E=ends_E)


class TokenDispatcher:
    """The exchange over one rank's expert group: tokens are sent where they go, or gathered, as the configuration
    says."""

    def __init__(self, config: TransformerConfig, context: ModelContext) -> None:
        groups = self._groups = context.groups
        self._gathers = config.moe_token_dispatcher_type == "allgather"
        self._sorting = Sorting(groups.expert.size, config.num_moe_experts // groups.ep.size, groups.device)
        self._ops = _Ops(context.ops["moe_permute"], context.ops["moe_unpermute"])

    def start_plan(self, routing: Routing) -> Callable[[], Exchange]:
        """Exchange counts and lay out the rows; call the result for the plan. With several ranks, or with dropped
        choices, the host then waits for the device, which computes the sizes of the exchange. Work that is launched
        between the two calls keeps the device busy meanwhile."""
        group, ep, etp = self._groups.expert, self._groups.ep.size, self._groups.etp.size
        rows_E, row_of_TJ = routing.rows_E, rows_to_send(routing, ep, etp)
        if group.size == 1:
            ends_E = rows_E.cumsum(0, dtype=torch.int32)
            if routing.kept_Tk is None:
                return lambda: _alone(group, row_of_TJ, ends_E, routing.ids_Tk.numel())
            total = start_reading(rows_E.sum())
            return lambda: _alone(group, row_of_TJ, ends_E, int(total()))
        send_RE = rows_E.view(ep, 1, -1).expand(-1, etp, -1).reshape(group.size, -1)
        every_SRE = all_gather(group, send_RE) if self._gathers else None
        count_SE = all_to_all(group, send_RE) if every_SRE is None else every_SRE[:, group.rank].contiguous()
        sizes = start_reading(torch.stack((send_RE, count_SE)).sum(dim=2))
        every_STJ = all_gather(group, row_of_TJ) if self._gathers else row_of_TJ
        # All that needs no sizes, so that the device waits for nothing else once they are known.
        orders, ends_E = self._sorting.start(count_SE), count_SE.sum(dim=0).cumsum(0, dtype=torch.int32)

        def plan() -> Exchange:
            sent, received = sizes().tolist()
            sort, unsort = orders(sum(received))
            places = None
            if every_SRE is not None:
                places = places_here(every_STJ, every_SRE.sum(dim=2), group.rank, unsort)
            return Exchange(
                group=group,
                row_of_TJ=row_of_TJ,
                sent=sent,
                received=received,
                ends_E=ends_E,
                sort=sort,
                unsort=unsort,
                place_of_AJ=places,
            )

        return plan

    def dispatch(self, x_TH: torch.Tensor, routing: Routing, plan: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[R, H]`` of the local experts, sorted by expert, and the routing weight of each row ``[R]`` fp32."""
        weight_C1 = routing.weight_Tk.reshape(-1, 1)
        row_of_CJ = plan.row_of_TJ.view(weight_C1.shape[0], -1)
        if plan.place_of_AJ is not None:
            rows_RH = _FromEveryone.apply(x_TH, plan.row_of_TJ, plan, self._ops)
            return rows_RH, _FromEveryone.apply(weight_C1, row_of_CJ, plan, self._ops).squeeze(1)
        rows_RH = self._ops.permute(x_TH, plan.row_of_TJ, sum(plan.sent))
        weight_R1 = self._ops.permute(weight_C1, row_of_CJ, sum(plan.sent))
        rows_RH, weight_R1 = _ToExperts.apply(rows_RH, weight_R1, plan)
        return rows_RH, weight_R1.squeeze(1)

    def combine(self, rows_RH: torch.Tensor, plan: Exchange) -> torch.Tensor:
        """The experts' outputs back at their tokens, added up: ``[T, H]``."""
        return self._ops.unpermute(_FromExperts.apply(rows_RH, plan), plan.row_of_TJ)
