"""The conformance checks fail where they should: variants with one planted fault each are caught."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Cut, Guarantee, Op
from tests.ops.calls import call, seeded_cases
from tests.ops.test_conformance import bits_that_depend_on_a_cut, changing_bits, unlike_reference

FP32, CPU = torch.float32, torch.device("cpu")
OPS = {op.spec.name: op for op in ALL_OPS}


def _reference(name: str):
    return OPS[name].variants[-1].fn


def _unordered(main_grad, dy, ids):
    """Tokens in whatever order, as atomics would add them."""
    order = torch.randperm(ids.numel())
    _reference("embedding_grad")(main_grad, dy[order], ids[order])


def _drifting():
    counter = itertools.count()

    def rms_norm(x, weight, eps):
        out = _reference("rms_norm")(x, weight, eps)
        return out * (1.0 + 2.0**-23) if next(counter) % 5 == 4 else out

    return rms_norm


def _unwritten(x, weight, ends, *, transposed=False):
    """Forgets the rows of the last expert."""
    out = torch.empty(x.shape[0], weight.shape[2 if transposed else 1])
    rows = int(ends[-2]) if len(ends) > 1 else 0
    out[:rows] = _reference("grouped_gemm")(x[:rows], weight, ends.clamp(max=rows), transposed=transposed)
    return out


def _half_gradient(x, weight, eps):
    x = x * 0.5 + x.detach() * 0.5
    return _reference("rms_norm")(x, weight, eps)


def _whole_batch(x, weight, eps):
    """A row's scale comes from a product with all rows, as a GEMM with another tile would."""
    noise = (x.detach().flatten(0, -2).sum(0) * 1e-6).sum()
    return _reference("rms_norm")(x, weight, eps) + noise


def test_the_reference_passes_what_follows():
    for name in ("embedding_grad", "rms_norm", "grouped_gemm"):
        assert changing_bits(OPS[name], _reference(name), FP32, CPU) == []
        assert unlike_reference(OPS[name], _reference(name), FP32, CPU) == []


def test_an_unordered_sum_is_caught():
    assert changing_bits(OPS["embedding_grad"], _unordered, FP32, CPU)


def test_one_ulp_in_one_call_of_five_is_caught():
    assert changing_bits(OPS["rms_norm"], _drifting(), FP32, CPU)


def test_unwritten_memory_is_caught():
    assert unlike_reference(OPS["grouped_gemm"], _unwritten, FP32, CPU)


def test_a_wrong_gradient_is_caught():
    assert unlike_reference(OPS["rms_norm"], _half_gradient, FP32, CPU)


def test_a_row_that_sees_other_rows_is_caught():
    (cut,) = OPS["rms_norm"].spec.cuts
    assert bits_that_depend_on_a_cut(OPS["rms_norm"], _whole_batch, cut, FP32, CPU)


def test_a_sum_that_depends_on_the_cut_is_caught():
    cut = Cut(name="rows", level=Guarantee.LAYOUT, args={1: 0, 2: 0}, outs=(None,))
    op = OPS["linear_grad"]
    assert bits_that_depend_on_a_cut(op, lambda main, dy, x: dy.t() @ x, cut, FP32, CPU)


def test_another_order_is_caught_where_the_order_is_promised():
    def backwards(rows_RH, row_of_TJ):
        return _reference("moe_unpermute")(rows_RH, row_of_TJ.flip(1))

    op = OPS["moe_unpermute"]
    pairs = [
        (call(fn, case).results[0], call(_reference("moe_unpermute"), case).results[0])
        for case in seeded_cases(op.spec, FP32, CPU)
        for fn in (backwards,)
    ]
    assert not all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.spec.name)
def test_gradients_are_compared_where_there_are_any(op: Op):
    """Some case has a gradient that is not zero for every argument that any case differentiates."""
    named = {at for case in seeded_cases(op.spec, FP32, CPU) for at in case.grads}
    seen = set()
    for case in seeded_cases(op.spec, FP32, CPU):
        grads = call(op.variants[-1].fn, case).grads
        seen |= {at for at, grad in grads.items() if bool((grad != 0).any())}
    assert seen == named
