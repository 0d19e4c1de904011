"""What digests promise beyond the conformance tests: only a cut leaves them as they are; and what kernels make."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.availability import installed
from megatron.core.ops.digest_pieces.definition import layout_free_digest
from tests.ops.calls import interpreted

INTERPRETED = """
import ctypes, mmap, platform, torch
from megatron.core.ops.catalog import ALL_OPS
library = ctypes.CDLL(None)
library.mmap.restype, below_2_gib = ctypes.c_void_p, 0x40
def low(arg):
    if isinstance(arg, (list, tuple)):
        return type(arg)(map(low, arg))
    if not isinstance(arg, torch.Tensor):
        return arg
    size, flags = arg.untyped_storage().nbytes() + 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | below_2_gib
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at = library.mmap(None, ctypes.c_size_t(size), access, flags, -1, ctypes.c_size_t(0))
    assert 0 < at < 2**31, at
    memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(at), dtype=torch.uint8).untyped_storage()
    there = torch.empty(0, dtype=arg.dtype).set_(memory, arg.storage_offset(), arg.shape, arg.stride())
    return there.copy_(arg)
for op in ALL_OPS:
    if op.spec.name.startswith("digest_"):
        fast = op.variant("deterministic_triton").fn
        for dtype in (torch.float32, torch.bfloat16):
            for case in op.spec.cases(torch.Generator().manual_seed(1), dtype, torch.device("cpu")):
                found = []
                for fn in (fast, op.variants[-1].fn):
                    args = [a.clone() if i in case.writes else a for i, a in enumerate(case.args)]
                    if dtype is torch.bfloat16 and platform.machine() == "x86_64":
                        args = low(args)
                    result = fn(*args)
                    found.append(result if result is not None else args[case.writes[0]])
                same = torch.equal(*found)
                print(op.spec.name, case.name, "same" if same else "DIFFERENT")
"""
"""Half of the cases lie where a Python that is not position-independent has its heap: there the interpreter takes an
address for a short integer."""


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_kernels_agree_with_the_definition_where_they_are_interpreted():
    lines = interpreted(INTERPRETED)
    assert len(lines) > 25
    assert [line for line in lines if not line.endswith(" same")] == []


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def values(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 256, (3000 * dtype.itemsize,), generator=torch.Generator().manual_seed(5))
    return raw.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_cut_gives_the_same_total(dtype: torch.dtype):
    whole = values(dtype)
    parts = [(0, 1), (1, 1024), (1024, 1025), (1025, 3000)]
    total = sum(layout_free_digest(whole[a:b], "w", 3, a) for a, b in parts)
    assert torch.equal(total, layout_free_digest(whole, "w", 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_place_shard_and_name_shows(dtype: torch.dtype):
    whole, seen = values(dtype), set()
    seen.add(tuple(layout_free_digest(whole, "w", 3).tolist()))
    for bit in range(8 * dtype.itemsize):
        changed = whole.clone()
        changed.view(torch.uint8)[dtype.itemsize * 77 + bit // 8] ^= 1 << bit % 8
        seen.add(tuple(layout_free_digest(changed, "w", 3).tolist()))
    swapped = whole.clone()
    swapped[[5, 2000]] = whole[[2000, 5]]
    for tensor, name, shard in ((whole, "v", 3), (whole, "w", 4), (swapped, "w", 3), (whole.roll(1), "w", 3)):
        seen.add(tuple(layout_free_digest(tensor, name, shard).tolist()))
    assert len(seen) == 1 + 8 * dtype.itemsize + 4


def test_flipped_signs_show_however_many():
    whole, seen = values(torch.float32), set()
    for count in range(1, 400):
        changed = whole.clone()
        changed.view(torch.uint8)[3 : 4 * count : 4] ^= 128
        seen.add(tuple(layout_free_digest(changed, "w", 0).tolist()))
    assert len(seen) == 399
    assert len({first for first, _ in seen}) == len({second for _, second in seen}) == 399
