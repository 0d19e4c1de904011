"""Sums through the memory of other GPUs have the bits of the stated order, also one after the other in one buffer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.core.digest.bits import same_bits
from megatron.core.ops.blocked_fold import OP
from megatron.core.process_groups.groups import create_process_groups
from megatron.core.process_groups.ordered_reduce import OrderedSums
from megatron.core.process_groups.peer_memory import PeerMemory, PeerSums
from megatron.core.process_groups.topology import plan_topology
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 1
SIZES = (1 << 20, 3 << 16, 1 << 21, 1 << 16)


def _sums(dtype: torch.dtype, planted: bool) -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = create_process_groups(plan_topology(world=world), device).dp
    fold = OP.variants[0].fn
    plain = OrderedSums(OP.variants[-1].fn)
    memory = PeerMemory(group, max(SIZES) * world, dtype, device)
    sums, agree = PeerSums(memory, fold), []
    for repeat in range(3):
        for number, size in enumerate(SIZES):
            generator = torch.Generator(device).manual_seed(100 * repeat + 10 * number + rank)
            flat = torch.randn(size * world, generator=generator, device=device).to(dtype)
            other = flat + 1 if planted else flat
            agree.append(same_bits(sums.reduce_scatter(flat, world), plain.reduce_scatter(group, other)))
            agree.append(same_bits(sums.all_reduce(flat), plain.all_reduce(group, other)))
            memory.mine[: flat.numel()].copy_(flat)
            shown = memory.mine[: flat.numel()]
            agree.append(same_bits(sums.reduce_scatter(shown, 1), plain.reduce_scatter(group, other, 1)))
    return agree


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs that map each other's memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_through_peers_memory_are_the_ordered_sums(dtype: torch.dtype) -> None:
    for of_rank in run_ranks(GPUS, _sums, dtype, False, backend="cpu:gloo,cuda:nccl"):
        assert all(of_rank)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs that map each other's memory")
def test_other_values_are_seen() -> None:
    """The control."""
    for of_rank in run_ranks(GPUS, _sums, torch.float32, True, backend="cpu:gloo,cuda:nccl"):
        assert not any(of_rank)
