"""References against other ways to say the same: torch's own functions, formulas, loops. All in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron.core.ops.activation.reference import activation
from megatron.core.ops.attention import deterministic as blocked
from megatron.core.ops.attention.reference import attention
from megatron.core.ops.attention_dropout.reference import attention_dropout
from megatron.core.ops.causal_conv1d.reference import causal_conv1d
from megatron.core.ops.cross_entropy_grad import deterministic as pieced_grad
from megatron.core.ops.cross_entropy_grad.reference import cross_entropy_grad
from megatron.core.ops.cross_entropy_stats import deterministic as pieced_stats
from megatron.core.ops.cross_entropy_stats.reference import cross_entropy_stats
from megatron.core.ops.elementwise import gelu, gelu_tanh, sigmoid, silu, softplus
from megatron.core.ops.fixed_order import prefix_sum
from megatron.core.ops.gated_rms_norm.reference import gated_rms_norm
from megatron.core.ops.grouped_gemm.reference import grouped_gemm
from megatron.core.ops.layer_norm.reference import layer_norm
from megatron.core.ops.rms_norm.reference import rms_norm
from megatron.core.ops.rope.reference import rope


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_norms():
    x, weight, bias = _normal(4, 3, 12), _normal(12), _normal(12)
    _same(rms_norm(x, weight, 1e-5), functional.rms_norm(x, (12,), weight, 1e-5))
    _same(layer_norm(x, weight, bias, 1e-5), functional.layer_norm(x, (12,), weight, bias, 1e-5))
    gate = _normal(4, 3, 12).flip(0)
    groups = (x * functional.silu(gate)).split(4, dim=-1)
    want = torch.cat([functional.rms_norm(g, (4,), eps=1e-5) for g in groups], dim=-1) * weight
    _same(gated_rms_norm(x, gate, weight, 4, 1e-5), want)


def test_causal_conv1d():
    x, weight, bias = _normal(2, 9, 5), _normal(5, 4), _normal(5)
    padded = functional.pad(x.transpose(1, 2), (3, 0))
    want = functional.silu(functional.conv1d(padded, weight.unsqueeze(1), bias, groups=5)).transpose(1, 2)
    _same(causal_conv1d(x, weight, bias), want)


def test_activations():
    x, weight = _normal(6, 8), _normal(6)
    _same(activation(x, "squared_relu", None), functional.relu(x) ** 2)
    _same(activation(x, "gelu", weight), functional.gelu(x) * weight[:, None])
    _same(activation(x, "gelu_tanh", None), functional.gelu(x, approximate="tanh"))
    _same(activation(x, "swiglu", weight), functional.silu(x[:, :4]) * x[:, 4:] * weight[:, None])
    with pytest.raises(ValueError, match="unknown activation"):
        activation(x, "quick", None)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sigmoid, torch.sigmoid),
        (silu, functional.silu),
        (softplus, lambda x: functional.softplus(x, threshold=1e9)),
        (gelu, functional.gelu),
        (gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_elementwise_functions_and_their_slopes(ours, theirs):
    x = torch.tensor([-700.0, -40.0, -3.0, -1e-9, -0.0, 0.0, 1e-9, 2.0, 40.0, 700.0], dtype=torch.float64)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    _same(ours(left), theirs(right))
    ours(left).sum().backward()
    theirs(right).sum().backward()
    _same(left.grad, right.grad)


@pytest.mark.parametrize("fn", [sigmoid, silu, softplus, gelu, gelu_tanh])
def test_elementwise_bits_do_not_depend_on_the_place(fn):
    x = torch.randn(1037, generator=torch.Generator().manual_seed(2)) * 4
    whole = fn(x)
    for start, stop in ((0, 1), (1, 8), (3, 36), (5, 1037), (1030, 1037)):
        assert torch.equal(fn(x[start:stop]), whole[start:stop])
        assert torch.equal(fn(x[start:stop].clone()), whole[start:stop])
    assert torch.equal(fn(x[::3]), whole[::3])


def test_rope_is_a_complex_product():
    x, angle = _normal(5, 2, 3, 10), _normal(5, 2, 4)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(2)
    _same(rope(x, angle), torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1))


def _attention_arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _normal(19, 2, 6, 8), _normal(19, 2, 3, 8), _normal(19, 2, 3, 8).flip(0)


def test_attention():
    q, k, v = _attention_arguments()
    heads_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    want = functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3, enable_gqa=True)
    _same(attention(q, k, v, 0.3), want.permute(2, 0, 1, 3))


def test_attention_does_not_look_ahead():
    q, k, v = _attention_arguments()
    later = [t.clone() for t in (k, v)]
    for t in later:
        t[10:] = 99.0
    assert torch.equal(attention(q, k, v, 0.3)[:10], attention(q, *later, 0.3)[:10])
    assert not torch.equal(attention(q, k, v, 0.3)[10:], attention(q, *later, 0.3)[10:])


def test_attention_dropout_drops_weights():
    q, k, v = _attention_arguments()
    keep = torch.rand(2, 6, 19, 19, generator=torch.Generator().manual_seed(1)) < 0.7
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(2, 2)) * 0.3
    scores = scores.masked_fill(torch.ones(19, 19, dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1) * keep / 0.7
    want = torch.einsum("bnst,tbnd->sbnd", weights, v.repeat_interleave(2, 2))
    _same(attention_dropout(q, k, v, 0.3, keep, 0.3), want)


def test_blocks_of_queries_do_not_show(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 4)
    q, k, v = (t.float().requires_grad_() for t in _attention_arguments())
    keep = torch.rand(2, 6, 19, 19, generator=torch.Generator().manual_seed(1)) < 0.7
    for ours, plain in (
        (blocked.blocked_attention(q, k, v, 0.3, None), attention(q, k, v, 0.3)),
        (blocked.blocked_attention(q, k, v, 0.3, (keep, 0.3)), attention_dropout(q, k, v, 0.3, keep, 0.3)),
    ):
        dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        for left, right in zip(
            torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(plain, (q, k, v), dout), strict=True
        ):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_cross_entropy_of_two_shards():
    logits, target = _normal(7, 12), torch.tensor([0, 3, 5, 6, 9, 10, 2])
    leaf = logits[:, :11].clone().requires_grad_()
    loss = functional.cross_entropy(leaf, target, reduction="none")
    shards = []
    for start, valid in ((0, 6), (6, 5)):
        local = torch.where((target >= start) & (target < start + 6), target - start, -1)
        shards.append((logits[:, start : start + 6], local, valid))
    stats = [cross_entropy_stats(*shard) for shard in shards]
    highest = torch.maximum(stats[0][0], stats[1][0])
    log_z = highest + sum(s[1] * (s[0] - highest).exp() for s in stats).log()
    _same(log_z - stats[0][2] - stats[1][2], loss.detach())
    dloss = _normal(7)
    (want,) = torch.autograd.grad(loss, leaf, dloss)
    got = torch.cat([cross_entropy_grad(*shard, log_z, dloss) for shard in shards], dim=1)
    _same(got[:, :11], want)
    assert not got[:, 11].any()


def test_pieces_of_rows_do_not_show(monkeypatch):
    logits, target = _normal(9, 12).float(), torch.randint(-1, 11, (9,))
    log_z, dloss = logits.logsumexp(-1), _normal(9).float()
    want_stats = cross_entropy_stats(logits, target, 11)
    want_grad = cross_entropy_grad(logits, target, 11, log_z, dloss)
    for size in (1, 24, 50):
        monkeypatch.setattr(pieced_stats, "_AT_ONCE", size)
        monkeypatch.setattr(pieced_grad, "_AT_ONCE", size)
        got_stats = pieced_stats.cross_entropy_stats(logits, target, 11)
        assert all(torch.equal(a, b) for a, b in zip(got_stats, want_stats, strict=True))
        assert torch.equal(pieced_grad.cross_entropy_grad(logits, target, 11, log_z, dloss), want_grad)


@pytest.mark.parametrize("ends", [(1, 2), (3,), (4, 3)])
def test_grouped_gemm_refuses_ends_that_do_not_fit(ends):
    with pytest.raises(ValueError, match="ends"):
        grouped_gemm(torch.zeros(3, 2), torch.zeros(2, 4, 2), torch.tensor(ends, dtype=torch.int32))


def test_prefix_sum():
    x = _normal(3, 13)
    _same(prefix_sum(x), x.cumsum(-1))
    assert prefix_sum(x[:, :0]).shape == (3, 0)
