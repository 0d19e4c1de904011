"""Self-attention against the textbook form, with grouped queries, rotary positions and dropout."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.digest.bits import same_bits
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.rotary import rotary_angles, rotary_frequencies
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)


def _rotate(x: torch.Tensor, base: float, width: int) -> torch.Tensor:
    """Complex-number form of the rotation; x is [S, B, N, D]."""
    half = width // 2
    frequency = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), frequency)[:, None, None]
    turned = torch.complex(x[..., :half], x[..., half:width]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., width:]), dim=-1)


def _textbook(layer: SelfAttention, x: torch.Tensor, heads: int, groups: int, rotated: int) -> torch.Tensor:
    length, batch, hidden = x.shape
    dim, per_group = layer.head_dim, heads // groups
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    rows = (normed @ layer.linear_qkv.weight.double().t()).view(length, batch, groups, per_group + 2, dim)
    q, k, v = rows[..., :per_group, :].flatten(2, 3), rows[..., per_group, :], rows[..., per_group + 1, :]
    if rotated:
        q, k = _rotate(q, 10000.0, rotated), _rotate(k, 10000.0, rotated)
    out = torch.zeros_like(q)
    for head in range(heads):
        group = head // per_group
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, group]) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        out[:, :, head] = torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, group])
    return out.flatten(2) @ layer.linear_proj.weight.double().t()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("percent", [0.0, 0.5, 1.0])
def test_agrees_with_the_textbook(groups: int, percent: float) -> None:
    rope = {"position_embedding_type": "rope", "rotary_percent": percent} if percent else {}
    config = tiny_config(num_query_groups=groups, **rope)
    layer = SelfAttention("layer", 0, config, tiny_context(groups_for_test()))
    x = torch.randn(16, 2, 64)
    got = layer(x, MICROBATCH, StageReport())
    want = _textbook(layer, x, 4, groups, int(16 * percent))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_without_grouped_queries_every_head_has_its_own_key() -> None:
    config = tiny_config(group_query_attention=False, num_query_groups=1)
    layer = SelfAttention("layer", 0, config, tiny_context(groups_for_test()))
    assert layer.linear_qkv.weight.shape[0] == 3 * 64


def test_the_future_is_not_seen() -> None:
    layer = SelfAttention("layer", 0, tiny_config(), tiny_context(groups_for_test()))
    x = torch.randn(16, 1, 64)
    changed = x.clone()
    changed[9:] += 1.0
    before, after = (layer(t, MICROBATCH, StageReport()) for t in (x, changed))
    assert same_bits(before[:9].detach(), after[:9].detach())
    assert not torch.allclose(before[9:], after[9:])


def test_dropout_drops_the_stated_share() -> None:
    layer = SelfAttention("layer", 3, tiny_config(attention_dropout=0.25), tiny_context(groups_for_test()))
    keep = layer._keep(2, 64, MICROBATCH)
    assert keep.shape == (2, 4, 64, 64)
    assert keep.float().mean().item() == pytest.approx(0.75, abs=0.01)


def test_angles_are_rounded_once() -> None:
    angles = rotary_angles(tiny_config(position_embedding_type="rope"), 64, torch.device("cpu"))
    assert angles.shape == (64, 8)
    assert angles[63, 1].item() == torch.tensor(63 * 10000.0 ** (-1 / 8), dtype=torch.float64).float().item()


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 heads in 3 groups"):
        SelfAttention("layer", 0, tiny_config(num_query_groups=3), tiny_context(groups_for_test()))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_queries_and_keys_are_normalised_per_head_before_rotation(kind: str) -> None:
    config = tiny_config(qk_layernorm=True, normalization=kind, position_embedding_type="rope")
    attention = SelfAttention("self_attention", 0, config, tiny_context(groups_for_test()))
    seen: dict[str, torch.Tensor] = {}
    attention.q_layernorm.register_forward_hook(lambda m, given, out: seen.update(q_in=given[0], q=out))
    attention.k_layernorm.register_forward_hook(lambda m, given, out: seen.update(k=out))
    attention(torch.randn(8, 2, 64), MICROBATCH, StageReport())
    assert seen["q"].shape == (8, 2, 4, 16)
    assert seen["k"].shape == (8, 2, 2, 16)
    if kind == "RMSNorm":
        want = torch.nn.functional.rms_norm(seen["q_in"], (16,), eps=1e-5)
    else:
        want = torch.nn.functional.layer_norm(seen["q_in"], (16,), eps=1e-5)
    torch.testing.assert_close(seen["q"], want)


def test_norms_of_heads_decay_only_when_told_to() -> None:
    for decays in (False, True):
        config = tiny_config(qk_layernorm=True, apply_wd_to_qk_layernorm=decays)
        attention = SelfAttention("self_attention", 0, config, tiny_context(groups_for_test()))
        specs = [attention.q_layernorm.weight.spec, attention.k_layernorm.weight.spec]
        assert [spec.name for spec in specs] == [f"self_attention.{w}_layernorm.weight" for w in "qk"]
        assert all(spec.weight_decay is decays and spec.tp_replicated and spec.shape == (16,) for spec in specs)


@pytest.mark.parametrize(("base", "half"), [(1, 4), (10000, 3), (10000, 4), (10000, 64), (500000, 64), (1000000, 32)])
def test_rotary_frequencies_are_the_nearest_to_the_exact_values(base: int, half: int):
    """f, its neighbours and the exact value to the power of ``half``, in exact arithmetic."""
    for i, frequency in enumerate(rotary_frequencies(base, half)):
        exact = Fraction(1, base**i)
        below, above = (math.nextafter(frequency, end) for end in (0.0, math.inf))
        for near in (below, above):
            middle = (Fraction(frequency) + Fraction(near)) / 2
            assert (middle**half < exact) == (near == below)
