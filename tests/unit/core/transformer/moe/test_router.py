"""Routing weights, ties, bias, jitter, counts and the balancing loss on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.moe import AUXILIARY_NAMES
from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.digest.bits import same_bits
from megatron.core.ops import philox
from megatron.core.transformer.moe.router import Routing, TopKRouter
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=4)


def _router(**changes: Any) -> TopKRouter:
    return TopKRouter("router", 0, tiny_config(**changes), tiny_context(groups_for_test()))


def _route(router: TopKRouter, x: torch.Tensor, microbatch: Microbatch = MICROBATCH) -> Routing:
    return router(x, microbatch, StageReport())


SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None}


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, lambda s, top: 2.5 * top.sigmoid() / (top.sigmoid().sum(-1, keepdim=True) + 1e-20)),
        ({"moe_router_topk": 1}, lambda s, top: 2.5 * top.sigmoid()),
        (SOFTMAX, lambda s, top: top.softmax(-1)),
        ({**SOFTMAX, "moe_router_pre_softmax": True}, lambda s, top: top.exp() / s.exp().sum(-1, keepdim=True)),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp64", None])
def test_weights_of_the_chosen(changes: dict[str, Any], weights: Any, dtype: str | None) -> None:
    router = _router(moe_router_dtype=dtype, moe_router_load_balancing_type=("none",), **changes)
    x = torch.randn(20, 2, 64)
    routing = _route(router, x)
    logits = x.flatten(0, 1) @ router.weight.t()
    k = changes.get("moe_router_topk", 2)
    ids = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(routing.ids_Tk, ids)
    torch.testing.assert_close(routing.weight_Tk, weights(logits, logits.gather(1, ids)), rtol=1e-5, atol=1e-6)
    assert routing.count_E.tolist() == torch.bincount(ids.flatten(), minlength=4).tolist()


def test_equal_scores_choose_the_lowest_ids() -> None:
    router = _router(num_moe_experts=16)
    router.weight.data.zero_()
    assert _route(router, torch.randn(7, 1, 64)).ids_Tk.tolist() == [[0, 1]] * 7


def test_bias_chooses_but_does_not_weigh() -> None:
    router = _router(moe_aux_loss_coeff=(0.0,))
    x = torch.randn(30, 1, 64)
    router.expert_bias_E.copy_(torch.tensor([-1e9, 0.0, 0.0, 1e9]))
    routing = _route(router, x)
    assert not (routing.ids_Tk == 0).any()
    assert (routing.ids_Tk == 3).any(dim=1).all()
    scores = (x.flatten(0, 1) @ router.weight.t()).sigmoid().gather(1, routing.ids_Tk)
    torch.testing.assert_close(routing.weight_Tk, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_counts_are_exact_integers_in_bfloat16() -> None:
    config = tiny_config()
    router = TopKRouter("router", 0, config, tiny_context(groups_for_test(), dtype=torch.bfloat16))
    ids = [_route(router, torch.randn(512, 4, 64).bfloat16()).ids_Tk for _ in range(3)]
    assert router.token_counts_E.dtype == torch.int64
    assert router.token_counts_E.tolist() == torch.bincount(torch.cat(ids).flatten(), minlength=4).tolist()
    assert router.token_counts_E.max() > 256
    assert router.expert_bias_E.dtype == torch.float32


def test_jitter_follows_logical_coordinates() -> None:
    router = _router(moe_input_jitter_eps=0.1)
    x = torch.ones(40, 2, 64)
    noise = router._jitter(x, MICROBATCH)
    assert same_bits(noise, router._jitter(x, MICROBATCH))
    assert 0.9 <= noise.min() < 0.91
    assert 1.09 < noise.max() <= 1.1
    later = Microbatch(iteration=2, shard=0, index=0, num_microbatches=4)
    assert not same_bits(noise, router._jitter(x, later))
    calm = Microbatch(iteration=1, shard=0, index=0, num_microbatches=4, training=False)
    assert router._jitter(x, calm) is x


def test_jitter_is_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    router = _router(moe_input_jitter_eps=0.1)
    x = torch.randn(40, 2, 64)
    whole = router._jitter(x, MICROBATCH)
    monkeypatch.setitem(philox._AT_ONCE, "cpu", 100)
    assert same_bits(router._jitter(x, MICROBATCH), whole)


def _balance(p: torch.Tensor, k: int) -> torch.Tensor:
    """The formula of the loss, for one set of tokens."""
    counts = torch.bincount(p.topk(k, dim=-1).indices.flatten(), minlength=p.shape[1])
    return p.shape[1] / (k * p.shape[0] ** 2) * (p.sum(0) * counts).sum()


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_balancing_loss_and_its_gradient(score: str, kind: str) -> None:
    router = _router(moe_router_score_function=score, moe_router_load_balancing_type=(kind,), moe_aux_loss_coeff=(0.5,))
    router.expert_bias_E.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    x, report = torch.randn(24, 3, 64), StageReport()
    routing = router(x, MICROBATCH, report)
    (0.0 * routing.weight_Tk.sum()).backward()
    weight = router.weight.detach().requires_grad_()
    logits = x @ weight.t()
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    parts = p.unbind(1) if kind == "seq_aux_loss" else [p.flatten(0, 1)]
    want = sum(_balance(part, 2) for part in parts) / len(parts)
    (0.5 * want / 4).backward()
    torch.testing.assert_close(report.per_layer[AUXILIARY_NAMES[kind]][0], want.detach())
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("changes", [{"moe_aux_loss_coeff": (0.0,)}, {"moe_router_load_balancing_type": ("none",)}])
def test_no_balancing_loss_when_not_asked_for(changes: dict[str, Any]) -> None:
    report = StageReport()
    _router(**changes)(torch.randn(8, 1, 64), MICROBATCH, report)
    assert not report.per_layer


def _two_steps(router: TopKRouter, x: list[torch.Tensor]) -> list[float]:
    values = []
    for step in (1, 2):
        for index, part in enumerate(x):
            report = StageReport()
            place = Microbatch(iteration=step, shard=0, index=index, num_microbatches=len(x))
            router(part, place, report)
            values.append(report.per_layer["global_load_balancing_loss"][0].item())
    return values


def test_global_balance_counts_the_step_so_far() -> None:
    router = _router(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,))
    x = [torch.randn(32, 1, 64) for _ in range(3)]
    p = [(part.flatten(0, 1) @ router.weight.t()).sigmoid().detach() for part in x]
    p = [part / part.sum(-1, keepdim=True) for part in p]
    counts = [torch.bincount(part.topk(2, dim=-1).indices.flatten(), minlength=4) for part in p]
    want = [4 / (2 * 32 * 32 * (i + 1)) * (p[i].sum(0) * sum(counts[: i + 1])).sum().item() for i in range(3)]
    assert _two_steps(router, x) == pytest.approx(want * 2, rel=1e-5)


def test_recomputed_router_sees_the_same_global_counts_and_counts_nothing() -> None:
    router = _router(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,))
    x = [torch.randn(32, 1, 64) for _ in range(2)]
    values = _two_steps(router, x)
    counted = router.token_counts_E.clone()
    report = StageReport()
    again = Microbatch(iteration=2, shard=0, index=0, num_microbatches=2, recomputing=True)
    router(x[0], again, report)
    assert report.per_layer["global_load_balancing_loss"][0].item() == values[0]
    assert torch.equal(router.token_counts_E, counted)


def test_z_loss_and_its_gradient() -> None:
    router = _router(moe_router_load_balancing_type=("none",), moe_z_loss_coeff=0.25)
    x, report = torch.randn(24, 3, 64), StageReport()
    (0.0 * router(x, MICROBATCH, report).weight_Tk.sum()).backward()
    weight = router.weight.detach().requires_grad_()
    want = (x @ weight.t()).logsumexp(-1).square().mean()
    (0.25 * want / 4).backward()
    torch.testing.assert_close(report.per_layer["z_loss"][0], want.detach())
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)


def test_several_losses_add_up_with_their_own_coefficients() -> None:
    both = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.1}
    x, grads = torch.randn(24, 2, 64), []
    for types, coefficients in [(tuple(both), tuple(both.values())), *[((k,), (c,)) for k, c in both.items()]]:
        router = _router(moe_router_load_balancing_type=types, moe_aux_loss_coeff=coefficients)
        report = StageReport()
        place = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)
        (0.0 * router(x, place, report).weight_Tk.sum()).backward()
        assert set(report.per_layer) == {AUXILIARY_NAMES[kind] for kind in types}
        grads.append(router.weight.grad)
    torch.testing.assert_close(grads[0], grads[1] + grads[2] + grads[3], rtol=1e-4, atol=1e-7)


def test_square_root_of_softplus_scores() -> None:
    router = _router(moe_router_score_function="sqrtsoftplus", moe_aux_loss_coeff=(0.0,))
    x = torch.randn(20, 1, 64)
    routing = _route(router, x)
    score = torch.nn.functional.softplus(x.flatten(0, 1) @ router.weight.t()).sqrt().gather(1, routing.ids_Tk)
    torch.testing.assert_close(routing.weight_Tk, 2.5 * score / score.sum(-1, keepdim=True))


def test_bias_takes_part_in_the_choice_of_groups() -> None:
    router = _router(num_moe_experts=8, moe_router_num_groups=4, moe_router_group_topk=1)
    router.expert_bias_E[4:6] = 10.0
    assert _route(router, torch.randn(9, 1, 64)).ids_Tk.tolist() == [[4, 5]] * 9


def test_forced_balance_ignores_scores_and_weighs_by_them() -> None:
    router = _router(moe_router_force_load_balancing=True, moe_aux_loss_coeff=(0.0,))
    x = torch.randn(16, 2, 64)
    routing = _route(router, x)
    assert routing.count_E.tolist() == [16] * 4
    scores = (x.flatten(0, 1) @ router.weight.t()).sigmoid().gather(1, routing.ids_Tk)
    torch.testing.assert_close(routing.weight_Tk, 2.5 * scores / scores.sum(-1, keepdim=True))
