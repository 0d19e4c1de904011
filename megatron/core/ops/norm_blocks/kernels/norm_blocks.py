# Order of addition: in a block, element i plus element i + half, halving ten times, in fp64; blocks add as integers.
"""Exact limbs of the squares of a flat tensor: one warp makes the sums of its blocks and spreads them over limbs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_blocks_kernel(
    flat_ptr, limbs_ptr, numel, blocks_each, BLOCK: tl.constexpr, LIMBS: tl.constexpr, UNIT_EXPONENT: tl.constexpr
):
    """Row p of limbs (32 int64, the flags behind the limbs) = the sum over the blocks of program p."""
    at = tl.arange(0, 32)
    total = tl.zeros([32], dtype=tl.int64)
    first = tl.program_id(0).to(tl.int64) * blocks_each
    for block in range(blocks_each):
        index = (first + block) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(flat_ptr + index, mask=index < numel, other=0.0).to(tl.float64)
        part = tl.sum(tl.reshape(x * x, [2, BLOCK // 2]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 4]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 8]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 16]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 32]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 64]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 128]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 256]), axis=0)
        part = tl.sum(tl.reshape(part, [2, BLOCK // 512]), axis=0)
        raw = tl.sum(part, axis=0).to(tl.int64, bitcast=True)
        exponent = (raw >> 52) & 0x7FF
        fraction = raw & 0xFFFFFFFFFFFFF
        finite = (exponent > 0) & (exponent < 0x7FF)
        mantissa = tl.where(finite, fraction | 0x10000000000000, 0)
        position = tl.where(finite, exponent - 1075 - UNIT_EXPONENT, 0)
        limb, shift = position >> 5, position & 31
        low, high = (mantissa & 0xFFFFFFFF) << shift, (mantissa >> 32) << shift
        total += tl.where(at == limb, low & 0xFFFFFFFF, 0)
        total += tl.where(at == limb + 1, ((low >> 32) & 0xFFFFFFFF) + (high & 0xFFFFFFFF), 0)
        total += tl.where(at == limb + 2, high >> 32, 0)
        special = exponent == 0x7FF
        total += tl.where((at == LIMBS) & special & (fraction == 0), 1, 0)
        total += tl.where((at == LIMBS + 1) & special & (fraction != 0), 1, 0)
    tl.store(limbs_ptr + tl.program_id(0).to(tl.int64) * 32 + at, total)
