"""What must change a fingerprint does: seed, data order, learning rate, one bit of one weight."""

from __future__ import annotations

import functools

import torch

from megatron.core.digest.bits import bits, digest_hex
from tests.support.ranks import run_ranks
from tests.support.training import build_here

BASE = "--hybrid-layer-pattern 'ME*-' --global-batch-size 2"


def _fingerprint(flags: str, flip: bool = False, order: int = 0) -> list[str]:
    """Loss, norm, state and data of two steps; ``flip`` changes the last bit of one weight before the second,
    ``order`` starts the data that many samples later."""
    run = build_here(f"{BASE} {flags}")
    reader, consumed, seen = run.reader(run.splits.train), order, []
    for iteration in (1, 2):
        if flip and iteration == 2:
            weight = next(run.chunks[0].model_parameters())
            bits(weight.data)[3, 5] ^= 1
        step = run.step.run(reader, iteration, consumed)
        consumed = step.consumed_samples
        seen += [step.losses["lm loss"].hex(), step.grad_norm.hex(), digest_hex(reader.take_digest())]
        seen += [digest_hex(total) for total in run.step.optimizer.state_digests().values()]
    return seen


@functools.cache
def _base() -> tuple[str, ...]:
    return tuple(run_ranks(1, _fingerprint, "")[0])


def test_a_second_process_repeats_every_bit() -> None:
    assert tuple(run_ranks(1, _fingerprint, "")[0]) == _base()


def test_seed_learning_rate_and_data_order_are_seen() -> None:
    seed, rate = run_ranks(1, _fingerprint, "--seed 1235")[0], run_ranks(1, _fingerprint, "--lr 1.0000001e-3")[0]
    order = run_ranks(1, _fingerprint, "", False, 2)[0]
    assert all(a != b for a, b in zip(seed[:2], _base()[:2], strict=True))
    assert rate[:3] == list(_base()[:3])
    assert rate != list(_base())
    assert order[0] != _base()[0]
    assert order[2] != _base()[2]


def test_one_bit_of_one_weight_is_seen() -> None:
    flipped = run_ranks(1, _fingerprint, "", True)[0]
    half = len(flipped) // 2
    assert flipped[:half] == list(_base()[:half])
    assert flipped[half:] != list(_base()[half:])


def test_bits_are_writable_in_place() -> None:
    """The planted bit really lands in the tensor."""
    tensor = torch.ones(2)
    bits(tensor)[1] ^= 1
    assert tensor[1] != 1.0
