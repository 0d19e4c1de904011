"""The exact accumulator of ``norm_blocks``: its format, and the norm it stands for.

A block sum is a multiple of 2^-298 below 2^267 (1,024 squares of fp32 numbers, added in fp64), so the sum of all block
sums is an integer multiple of 2^-352. It is kept in ``LIMBS`` int64 limbs: limb i counts units of 2^(32 i - 352).
Limbs are not normalised: those of several pieces or ranks are added as int64, exactly and in any order, for up to 2^30
blocks. Two more entries count blocks that are infinite and blocks that are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 1024
LIMBS = 20
UNIT_EXPONENT = -352
INFINITE = LIMBS
NOT_A_NUMBER = LIMBS + 1
SIZE = LIMBS + 2


def norm_from_limbs(limbs: Sequence[int]) -> float:
    """The square root of the exact total, correctly rounded to fp64; NaN and infinity win over numbers.

    ``limbs`` are the ``SIZE`` integers of ``norm_blocks``, summed over all pieces.

    Raises:
        ValueError: there are not ``SIZE`` of them.
    """
    if len(limbs) != SIZE:
        raise ValueError(f"{len(limbs)} limbs, {SIZE} are needed")
    if limbs[NOT_A_NUMBER]:
        return math.nan
    if limbs[INFINITE]:
        return math.inf
    total = sum(limb << (32 * i) for i, limb in enumerate(limbs[:LIMBS]))
    # 128 more bits than needed, and one that says whether the integer root is exact: enough to round correctly.
    shifted = total << 256
    root = math.isqrt(shifted)
    sticky = 2 * root + (root * root != shifted)
    return sticky / (1 << (129 - UNIT_EXPONENT // 2))
