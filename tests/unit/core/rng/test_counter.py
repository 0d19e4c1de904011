"""Counter-based draws: published Philox vectors, and the same values however a tensor is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.contracts.param_spec import (
    Initial,
    LogicalShard,
    ParamSpec,
    cut_shard,
    expert_shard,
    replicated_shard,
)
from megatron.core.digest.bits import same_bits
from megatron.core.ops import philox as pieces
from megatron.core.ops.philox import box_index, keep_mask, philox
from megatron.core.rng.counter import box_mask, draw_initial, draw_shard, key_of, uniform
from megatron.core.rng.initial_values import draw_parameter

NORMAL = Initial(kind="normal", a=0.02)


def _spec(shape, shard, initial=NORMAL, name="w"):
    return ParamSpec(
        name=name, shape=shape, num_shards=shape[0], shards=(shard,), initial=initial, expert=len(shape) == 3
    )


def _draw(shape, shard, initial=NORMAL, seed=1, name="w", dtype=torch.float32):
    out = torch.empty(shard.shape, dtype=dtype)
    draw_shard(_spec(shape, shard, initial, name), shard, seed, out)
    return out


def _naive(shape, shard, initial=NORMAL):
    """Every index of the global tensor, cut; all drawn at once."""
    whole = torch.arange(math.prod(shape)).view(shape)
    index = torch.cat([whole[tuple(slice(*range_) for range_ in box)] for box in shard.boxes], shard.dim)
    return draw_initial(initial, key_of(1, "initial value", "w"), index)


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


ANY_BOXES = LogicalShard(
    index=0, boxes=(((1, 4), (2, 5), (3, 7)), ((1, 4), (9, 10), (3, 7)), ((1, 4), (6, 8), (3, 7))), dim=1
)
CUTS = [
    ((1,), replicated_shard((1,))),
    ((0, 4), replicated_shard((0, 4))),
    ((4, 0), replicated_shard((4, 0))),
    ((12, 7), cut_shard((12, 7), 0, 1, 2, (4, 8))),
    ((7, 12), cut_shard((7, 12), 1, 2, 3, (3, 6, 3))),
    ((7, 12), cut_shard((7, 12), 1, 0, 2, (0, 12))),
    ((5, 6, 9), expert_shard((5, 6, 9), 3, 1, 1, 2, (2, 4))),
    ((5, 6, 9), expert_shard((5, 6, 9), 4, 2, 2, 3)),
    ((5, 11, 8), ANY_BOXES),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize(("shape", "shard"), CUTS)
def test_any_part_of_any_cut_is_what_the_definition_says(monkeypatch, shape, shard, at_once, dtype):
    monkeypatch.setitem(pieces._AT_ONCE, "cpu", at_once)
    want = _naive(shape, shard).to(dtype)
    assert same_bits(_draw(shape, shard, dtype=dtype), want)
    for start, stop in ((0, shard.numel // 2), (shard.numel // 3, shard.numel)):
        part = torch.empty(stop - start, dtype=dtype)
        draw_shard(_spec(shape, shard), shard, 1, part, start)
        assert same_bits(part, want.flatten()[start:stop])


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned in memory of its own."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.elements = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.known:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "shard"),
    [
        ((3, 40, 50), expert_shard((3, 40, 50), 1, 1, 0, 1)),
        ((3, 40, 50), expert_shard((3, 40, 50), 1, 2, 1, 2)),
        ((1, 2000), replicated_shard((1, 2000))),
        ((2000, 1), replicated_shard((2000, 1))),
        ((40, 60), cut_shard((40, 60), 1, 1, 2, (20, 40))),
    ],
)
def test_nothing_of_the_size_of_a_parameter_is_made_beside_it(monkeypatch, shape, shard, dtype):
    monkeypatch.setitem(pieces._AT_ONCE, "cpu", 64)
    spec = _spec(shape, shard)
    out = torch.empty(spec.local_shape, dtype=dtype)
    with _Largest(out) as seen:
        draw_parameter(spec, 1, out)
    assert seen.elements == 64
    with _Largest(out) as seen:
        draw_initial(NORMAL, (1, 2), torch.arange(shard.numel))
    assert seen.elements == shard.numel


def test_a_mask_is_drawn_in_pieces(monkeypatch):
    sizes: list[int] = []

    def counted(key, index, drop_probability):
        sizes.append(index.numel())
        return keep_mask(key, index, drop_probability)

    monkeypatch.setitem(pieces._AT_ONCE, "cpu", 64)
    monkeypatch.setattr(pieces, "keep_mask", counted)
    shape, box, cpu = (2, 6, 20, 20), ((0, 2), (2, 4), (0, 20), (0, 20)), torch.device("cpu")
    got = box_mask((1, 2), shape, box, 0.3, cpu)
    assert max(sizes) == 64
    assert sum(sizes) == got.numel() == 1600
    assert torch.equal(got, keep_mask((1, 2), box_index(shape, box, cpu), 0.3))


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
