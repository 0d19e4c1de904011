"""Row orders of the exchange, in plain Python."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.ops.router_table.reference import router_table
from megatron.core.transformer.moe.dispatcher import Sorting, places_here, rows_to_send
from megatron.core.transformer.moe.router import Routing


def routing_of(ids: torch.Tensor, experts: int, kept: torch.Tensor | None = None) -> Routing:
    taken = router_table(ids, experts, kept)
    count = taken.sum(0)
    return Routing(ids_Tk=ids, weight_Tk=ids.float(), count_E=count, taken_TE=taken, rows_E=count, kept_Tk=kept)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_rows_are_sorted_by_receiver_then_expert_then_token(ep: int, etp: int, tokens: int) -> None:
    experts, k = 8, 3
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :k].sort(dim=1).values
    rows = rows_to_send(routing_of(ids, experts), ep, etp)
    per_rank = experts // ep
    wanted = sorted(
        (int(ids[t, i]) // per_rank, e, int(ids[t, i]), t, i * etp + e)
        for t, i, e in itertools.product(range(tokens), range(k), range(etp))
    )
    assert rows.shape == (tokens, k * etp)
    assert [int(rows[t, j]) for _, _, _, t, j in wanted] == list(range(tokens * k * etp))


class _Scatters(TorchDispatchMode):
    """Counts what makes a table of choices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += "scatter" in func.name()
        return func(*args, **(kwargs or {}))


def test_the_routing_carries_the_table_of_choices() -> None:
    with _Scatters() as making:
        routing = routing_of(torch.tensor([[0, 2], [1, 2]]), 4)
    with _Scatters() as using:
        rows = rows_to_send(routing, 2, 1)
    assert (making.count, using.count) == (1, 0)
    assert rows.tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_gathered_copies_go_where_sent_ones_arrive(ep: int, etp: int) -> None:
    """Each member's sorted rows, made of what was sent, and of everyone's rows. The last member gets nothing."""
    experts, k, tokens, members = 8, 2, 5, ep * etp
    ids = [torch.rand(tokens, experts - 2).argsort(dim=1)[:, :k].sort(dim=1).values for _ in range(members)]
    routings = [routing_of(chosen, experts) for chosen in ids]
    rows_STJ = torch.stack([rows_to_send(routing, ep, etp) for routing in routings])
    count_SRE = torch.stack([r.rows_E.view(ep, 1, -1).expand(-1, etp, -1).reshape(members, -1) for r in routings])
    labels = torch.arange(rows_STJ.numel()).view(members, -1)
    for rank in range(members):
        arrived = []
        for sender in range(members):
            by_row = torch.empty(rows_STJ[sender].numel(), dtype=torch.int64)
            by_row[rows_STJ[sender].flatten()] = labels[sender]
            arrived.append(by_row.split(count_SRE[sender].sum(1).tolist())[rank])
        received, count_SE = torch.cat(arrived), count_SRE[:, rank].contiguous()
        sort, unsort = Sorting(*count_SE.shape, count_SE.device).start(count_SE)(len(received))
        places = places_here(rows_STJ, count_SRE.sum(2), rank, unsort).flatten()
        assert int((places >= 0).sum()) == len(received)
        assert [labels.flatten()[places == i].item() for i in range(len(received))] == received[sort].tolist()


def test_received_rows_are_sorted_by_expert_then_sender() -> None:
    count_SE = torch.tensor([[2, 0, 1], [0, 0, 0], [1, 3, 2], [0, 1, 0]])
    received = [(e, s, p) for s, row in enumerate(count_SE.tolist()) for e, n in enumerate(row) for p in range(n)]
    order, inverse = Sorting(4, 3, count_SE.device).start(count_SE)(len(received))
    assert [received[i] for i in order.tolist()] == sorted(received)
    assert torch.equal(order[inverse], torch.arange(len(received)))


def test_nothing_received() -> None:
    count_SE = torch.zeros(3, 2, dtype=torch.int64)
    assert [order.shape for order in Sorting(3, 2, count_SE.device).start(count_SE)(0)] == [(0,), (0,)]


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_dropped_choices_have_no_row_and_padding_comes_last(ep: int, etp: int, padded: bool) -> None:
    experts, tokens = 4, 20
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :2].sort(dim=1).values
    kept = torch.rand(tokens, 2) > 0.4
    used = torch.tensor([int(((ids == e) & kept).sum()) for e in range(experts)])
    rows_E = torch.full_like(used, 17) if padded else used
    rows = rows_to_send(replace(routing_of(ids, experts, kept), rows_E=rows_E), ep, etp)
    assert rows[~kept.repeat_interleave(etp, dim=1)].eq(-1).all()
    per_rank, start = experts // ep, 0
    for owner, r in itertools.product(range(ep), range(etp)):
        for e in range(owner * per_rank, (owner + 1) * per_rank):
            places = [(t, j) for t in range(tokens) for j in range(2) if ids[t, j] == e and kept[t, j]]
            assert [int(rows[t, j * etp + r]) for t, j in places] == list(range(start, start + len(places)))
            start += int(rows_E[e])
