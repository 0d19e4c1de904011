"""Two GPUs: what NCCL adds in transit has the bits of the stated sum, for values of every size and kind.

Also says what NCCL's bf16 sum must not be taken for: the fp32 sum of bf16 terms, which is wider.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron.core.ops.blocked_fold.reference import blocked_fold
from megatron.core.process_groups.groups import create_process_groups
from megatron.core.process_groups.ordered_reduce import _adds_in_transit, all_reduce_of_two, reduce_scatter_of_two
from megatron.core.process_groups.topology import plan_topology

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PATTERNS: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
NUMEL, ROUNDS = 1 << 26, 6


def _values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns: every exponent, denormals, zeros of both signs, infinities, NaN."""
    kind = PATTERNS[dtype]
    generator = torch.Generator("cuda").manual_seed(seed)
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max + 1, (NUMEL,), generator=generator, dtype=torch.int64, device="cuda")
    return bits.to(kind).view(dtype)


def _differing(got: torch.Tensor, want: torch.Tensor) -> int:
    kind = PATTERNS[want.dtype]
    return int(((got.view(kind) != want.view(kind)) & ~(got.isnan() & want.isnan())).sum())


def _compare() -> None:
    """Rank function under torchrun: prints the places that differ, per type and call."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = create_process_groups(plan_topology(world=2), torch.device("cuda", rank)).dp
    for dtype in PATTERNS:
        wrong = [0, 0]
        for round_number in range(ROUNDS):
            both = [_values(dtype, 2 * round_number + r) for r in range(2)]
            if round_number % 2:  # cancellation and ties: the other term is close in size
                both[1] = (both[0].double() * (both[1].double().sin() * 2.0)).to(dtype)
            assert _adds_in_transit(group, both[rank])
            want = (both[0].float() + both[1].float()).to(dtype)
            wrong[0] += _differing(all_reduce_of_two(group, both[rank]), want)
            half = slice(rank * NUMEL // 2, (rank + 1) * NUMEL // 2)
            wrong[1] += _differing(reduce_scatter_of_two(group, both[rank]), want[half])
        if rank == 0:
            wide = blocked_fold(torch.stack([b[:4096] for b in both]).nan_to_num(0.0), 2)
            print(dtype, *wrong, "wider:", not torch.equal(wide, wide.to(dtype).float()), flush=True)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_adds_two_terms_as_stated() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "torch.bfloat16 0 0 wider: True",
        "torch.float16 0 0 wider: True",
        "torch.float32 0 0 wider: False",
    ]


if __name__ == "__main__":
    _compare()
