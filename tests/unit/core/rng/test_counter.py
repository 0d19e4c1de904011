"""Counter-based draws: published Philox vectors, and the same values however a tensor is cut."""

from __future__ import annotations

import pytest
import torch

from megatron.core.contracts.param_spec import Initial, cut_shard, expert_shard, replicated_shard
from megatron.core.digest.bits import same_bits
from megatron.core.ops.philox import philox
from megatron.core.rng.counter import draw_shard, keep_mask, key_of, uniform

NORMAL = Initial(kind="normal", a=0.02)


def _draw(shape, shard, initial=NORMAL, seed=1, name="w"):
    out = torch.empty(shard.shape)
    draw_shard(seed, name, shape, shard, initial, out)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, want):
    """Known answers of the Random123 distribution."""
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == want


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_draws_its_piece_of_the_whole(dim, size):
    shape = (48, 33) if dim == 0 else (33, 48)
    parts = (6, 12, 30)
    whole = _draw(shape, replicated_shard(shape))
    for rank in range(size):
        pieces = [part.chunk(size, dim)[rank] for part in whole.split(parts, dim)]
        assert same_bits(_draw(shape, cut_shard(shape, dim, rank, size, parts)), torch.cat(pieces, dim).contiguous())


def test_an_expert_draws_its_piece_of_the_stack():
    shape = (4, 8, 6)
    whole = _draw(shape, replicated_shard(shape))
    got = _draw(shape, expert_shard(shape, 2, 2, 1, 3))
    assert same_bits(got, whole[2:3, :, 2:4].contiguous())


def test_names_and_seeds_change_the_draw():
    shard = replicated_shard((1024,))
    base = _draw((1024,), shard)
    assert not same_bits(base, _draw((1024,), shard, name="v"))
    assert not same_bits(base, _draw((1024,), shard, seed=2))


def test_distributions():
    shard = replicated_shard((200_000,))
    normal = _draw((200_000,), shard)
    assert abs(normal.mean()) < 2e-4
    assert abs(normal.std() - 0.02) < 2e-4
    dt = _draw((200_000,), shard, Initial(kind="inverse_softplus_log_uniform", a=1e-3, b=0.1, floor=1e-4))
    steps = torch.nn.functional.softplus(dt)
    assert 0.99e-3 < steps.min() < 1.01e-3
    assert 0.099 < steps.max() < 0.1001
    decay = _draw((200_000,), shard, Initial(kind="log_uniform", a=1.0, b=16.0)).exp()
    assert abs(decay.mean() - 8.5) < 0.05


def test_dropout_keeps_the_stated_share():
    index = torch.arange(200_000)
    mask = keep_mask(key_of(1, "dropout"), index, 0.1)
    assert abs(mask.float().mean() - 0.9) < 3e-3
    assert keep_mask(key_of(1, "dropout"), index, 0.0).all()
    assert not torch.equal(mask, keep_mask(key_of(2, "dropout"), index, 0.1))
    assert uniform(key_of(1), index).min() >= 0.0
    assert uniform(key_of(1), index).max() < 1.0
