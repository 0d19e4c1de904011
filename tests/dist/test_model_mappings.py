"""Borders of tensor-parallel regions on two ranks: values and gradients against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.contracts.param_spec import Initial
from megatron.core.digest.bits import same_bits
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.context import ModelContext
from megatron.core.tensor_parallel.linear import linear
from megatron.core.tensor_parallel.parameter import create_parameter, cut_spec
from tests.support.ranks import groups_for_test, run_ranks
from tests.support.tiny import tiny_context

REGIONS: dict[str, Callable[[torch.Tensor, ModelContext], torch.Tensor]] = {
    name: getattr(mappings, name)
    for name in (
        "copy_to_tp",
        "reduce_from_tp",
        "reduce_scatter_to_sequence",
        "gather_columns",
    )
}


def _draw(kind: str, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * len(kind) + rank)
    return torch.randn(shape, generator=generator)


def _cross() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    groups = groups_for_test(tp=2)
    context, seen = tiny_context(groups), {}
    for name, region in REGIONS.items():
        x = _draw("value", groups.tp.rank, (4, 3, 6)).requires_grad_()
        y = region(x, context)
        y.backward(_draw("gradient", groups.tp.rank, tuple(y.shape)))
        seen[name] = (y.detach(), x.grad)
    return seen


def test_regions_do_what_they_say() -> None:
    first, second = run_ranks(2, _cross)
    x, y = (_draw("value", rank, (4, 3, 6)) for rank in range(2))

    def dy(*shape: int) -> list[torch.Tensor]:
        return [_draw("gradient", rank, shape) for rank in range(2)]

    want = {
        "copy_to_tp": [(t, sum(dy(4, 3, 6))) for t in (x, y)],
        "reduce_from_tp": [(x + y, g) for g in dy(4, 3, 6)],
        "reduce_scatter_to_sequence": [(t, torch.cat(dy(2, 3, 6))) for t in (x + y).chunk(2)],
        "gather_columns": [(torch.cat((x, y), -1), g) for g in sum(dy(4, 3, 12)).chunk(2, -1)],
    }
    for name, pairs in want.items():
        for seen, (value, grad) in zip((first, second), pairs, strict=True):
            assert same_bits(seen[name][0], value.contiguous()), name
            assert same_bits(seen[name][1].contiguous(), grad.contiguous()), name


def test_one_rank_passes_through() -> None:
    context, x = tiny_context(groups_for_test()), torch.randn(4, 3, 6)
    assert all(region(x, context) is x for region in REGIONS.values())


def _kept_for_backward() -> list[tuple[int, ...]]:
    context = tiny_context(groups_for_test(tp=2), sequence_parallel=True)
    weight = create_parameter(cut_spec("w", (8, 6), 0, Initial(kind="normal", a=1.0), context), context)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = linear(torch.randn(4, 3, 6), weight, context, gather=True)
    assert y.shape == (8, 3, 4)
    return kept


def test_gathered_inputs_are_not_kept() -> None:
    assert run_ranks(2, _kept_for_backward) == [[(4, 3, 6)]] * 2
