# Order of addition: none across elements; products and sums are rounded one by one (launched without fusion). Digests
# are wrapping sums of integers, exact in any order.
"""One AdamW step of the pieces of a table in one pass, with working weights, and digests while all is in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.digest_pieces.kernels.digest_pieces import store_pair, weighed_sums, word_keys


@triton.jit
def bits_of(values):
    """The bits of fp32 or bf16 numbers as signed integers."""
    if values.dtype == tl.float32:  # noqa: SIM108 (both arms of an expression would be compiled)
        bits = values.to(tl.int32, bitcast=True)
    else:
        bits = values.to(tl.int16, bitcast=True)
    return bits


@triton.jit(do_not_specialize=["num_tiles"])
def adam_tiles_kernel(
    param_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, weights_ptr, table_ptr, more_ptr, tiles_ptr, out_ptr, num_tiles,
    clip_factor, beta1, beta1_rest, beta2, beta2_rest, root_correction, eps, step_size, decay,
    DIGESTS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads four streams, writes four; out[tensor, tile, lane] as in digest_pieces, of the first DIGESTS of masters,
    both moments, weights and gradients (as they lie, not clipped). ALIGNED divides all offsets and lengths."""
    tile = tl.program_id(0).to(tl.int64)
    piece = tl.load(tiles_ptr + 2 * tile)
    begin = tl.multiple_of(tl.load(tiles_ptr + 2 * tile + 1), BLOCK)
    facts_ptr, more_ptr = table_ptr + piece * 5, more_ptr + piece * 2
    state_at = tl.multiple_of(tl.load(facts_ptr), ALIGNED)
    buffer_at = tl.multiple_of(tl.load(more_ptr), ALIGNED)
    length, start = tl.multiple_of(tl.load(facts_ptr + 1), ALIGNED), tl.load(facts_ptr + 2)
    key_0, key_1 = tl.load(facts_ptr + 3), tl.load(facts_ptr + 4)
    decays = tl.load(more_ptr + 1) != 0
    zero = tl.zeros((BLOCK // 4,), tl.uint64)
    a0, a1, b0, b1, c0, c1, d0, d1, e0, e1 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for block in range(0, TILE, BLOCK):
        index = begin + block + tl.arange(0, BLOCK)
        inside = index < length
        at, place = state_at + index, buffer_at + index
        given = tl.load(grad_ptr + place, mask=inside, other=0.0)
        grad = given * clip_factor
        first = tl.load(exp_avg_ptr + at, mask=inside, other=0.0) * beta1 + grad * beta1_rest
        second = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0) * beta2 + grad * grad * beta2_rest
        root = tl.div_rn(tl.sqrt_rn(second), root_correction) + eps
        update = tl.div_rn(first * step_size, root)
        param = tl.load(param_ptr + at, mask=inside, other=0.0)
        param = tl.where(decays, param * decay, param) - update
        weight = param.to(weights_ptr.dtype.element_ty)
        tl.store(exp_avg_ptr + at, first, mask=inside)
        tl.store(exp_avg_sq_ptr + at, second, mask=inside)
        tl.store(param_ptr + at, param, mask=inside)
        tl.store(weights_ptr + place, weight, mask=inside)
        if DIGESTS:
            even, odd = word_keys(start + index, key_0, key_1)
            # What lies behind the piece weighs nothing.
            even, odd = tl.where(inside, even, 0), tl.where(inside, odd, 0)
            even_sum, odd_sum = weighed_sums(even, odd, bits_of(param))
            a0, a1 = a0 + even_sum, a1 + odd_sum
            even_sum, odd_sum = weighed_sums(even, odd, bits_of(first))
            b0, b1 = b0 + even_sum, b1 + odd_sum
            even_sum, odd_sum = weighed_sums(even, odd, bits_of(second))
            c0, c1 = c0 + even_sum, c1 + odd_sum
            even_sum, odd_sum = weighed_sums(even, odd, bits_of(weight))
            d0, d1 = d0 + even_sum, d1 + odd_sum
            if DIGESTS > 4:
                even_sum, odd_sum = weighed_sums(even, odd, bits_of(given))
                e0, e1 = e0 + even_sum, e1 + odd_sum
    if DIGESTS:
        store_pair(out_ptr + 2 * tile, a0, a1)
        store_pair(out_ptr + 2 * (num_tiles + tile), b0, b1)
        store_pair(out_ptr + 2 * (2 * num_tiles + tile), c0, c1)
        store_pair(out_ptr + 2 * (3 * num_tiles + tile), d0, d1)
        if DIGESTS > 4:
            store_pair(out_ptr + 2 * (4 * num_tiles + tile), e0, e1)
