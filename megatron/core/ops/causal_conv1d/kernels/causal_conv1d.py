# Order of addition: bias first, then taps ascending. Gradients of the parameters: a program adds its positions
# ascending into its own partial; partials are added in program order by column_sum.
"""Causal depthwise convolution over up to four positions, with SiLU; channels are adjacent in memory.

A window of W < 4 positions is one of four whose first taps are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.device_functions import sigmoid


@triton.jit
def tap_weight(weight_ptr, channel, num_channels, tap: tl.constexpr, W: tl.constexpr):
    """Weight of tap 0..3 of the padded window, fp32."""
    if tap < 4 - W:
        return tl.zeros(channel.shape, dtype=tl.float32)
    return tl.load(weight_ptr + channel * W + (tap + W - 4), mask=channel < num_channels, other=0.0).to(tl.float32)


@triton.jit
def row_at(at, offset, inside, here):
    """One position of a tile of channels as it lies in memory; zeros unless it is ``here``."""
    return tl.load(at + offset, mask=inside & here, other=0.0)


@triton.jit
def store_silu(ptr, total, mask):
    """silu(total), rounded to the type of the output."""
    tl.store(ptr, (total * sigmoid(total)).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def causal_conv1d_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = silu(conv). Grid: channel tiles, runs of positions, samples.

    Four positions at a time; the next four are on their way to registers.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < num_channels
    start = tl.program_id(1) * RUN
    end = tl.minimum(start + RUN, length)
    sample = tl.program_id(2).to(tl.int64)
    x_at = x_ptr + sample * batch_stride + start.to(tl.int64) * x_stride + channel
    y_at = y_ptr + (sample * length + start) * num_channels + channel
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    w0 = tap_weight(weight_ptr, channel, num_channels, 0, W)
    w1 = tap_weight(weight_ptr, channel, num_channels, 1, W)
    w2 = tap_weight(weight_ptr, channel, num_channels, 2, W)
    w3 = tap_weight(weight_ptr, channel, num_channels, 3, W)
    x1 = row_at(x_at, -x_stride, inside, start > 0).to(tl.float32)
    x2 = row_at(x_at, -2 * x_stride, inside, start > 1).to(tl.float32)
    x3 = row_at(x_at, -3 * x_stride, inside, start > 2).to(tl.float32)
    next_a = row_at(x_at, 0, inside, start < end)
    next_b = row_at(x_at, x_stride, inside, start + 1 < end)
    next_c = row_at(x_at, 2 * x_stride, inside, start + 2 < end)
    next_e = row_at(x_at, 3 * x_stride, inside, start + 3 < end)
    for step in range(0, RUN, 4):
        left = end - start - step
        a, b = next_a.to(tl.float32), next_b.to(tl.float32)
        c, e = next_c.to(tl.float32), next_e.to(tl.float32)
        x_at += 4 * x_stride
        next_a = row_at(x_at, 0, inside, left > 4)
        next_b = row_at(x_at, x_stride, inside, left > 5)
        next_c = row_at(x_at, 2 * x_stride, inside, left > 6)
        next_e = row_at(x_at, 3 * x_stride, inside, left > 7)
        store_silu(y_at, bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * a, inside & (left > 0))
        store_silu(y_at + num_channels, bias + w0 * x2 + w1 * x1 + w2 * a + w3 * b, inside & (left > 1))
        store_silu(y_at + 2 * num_channels, bias + w0 * x1 + w1 * a + w2 * b + w3 * c, inside & (left > 2))
        store_silu(y_at + 3 * num_channels, bias + w0 * a + w1 * b + w2 * c + w3 * e, inside & (left > 3))
        y_at += 4 * num_channels
        x3, x2, x1 = b, c, e


@triton.jit
def dsilu(total, dy):
    """Gradient of silu(total)."""
    opened = sigmoid(total)
    return dy.to(tl.float32) * (opened + total * opened * (1.0 - opened))


@triton.jit
def causal_conv1d_bwd_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, dx_ptr, parts_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and this program's partial: gradients [C, 4] of the taps, which are adjacent, then [C] of the bias.

    The gradient of a position needs the three positions after it, so a program reads four more than its run. STAGES - 1
    steps of four positions are on their way to shared memory while one is worked on.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < num_channels
    start = tl.program_id(1) * RUN
    sample = tl.program_id(2).to(tl.int64)
    x_at = x_ptr + sample * batch_stride + start.to(tl.int64) * x_stride + channel
    place = (sample * length + start) * num_channels + channel
    dy_at, dx_at = dy_ptr + place, dx_ptr + place
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    w0 = tap_weight(weight_ptr, channel, num_channels, 0, W)
    w1 = tap_weight(weight_ptr, channel, num_channels, 1, W)
    w2 = tap_weight(weight_ptr, channel, num_channels, 2, W)
    w3 = tap_weight(weight_ptr, channel, num_channels, 3, W)
    x1 = row_at(x_at, -x_stride, inside, start > 0).to(tl.float32)
    x2 = row_at(x_at, -2 * x_stride, inside, start > 1).to(tl.float32)
    x3 = row_at(x_at, -3 * x_stride, inside, start > 2).to(tl.float32)
    # One tensor for each: Triton 3.6 mixes up variables of a loop that start as the same object and are shifted.
    g1 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    g2 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    g3 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dw0 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dw1 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dw2 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dw3 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in tl.range(0, RUN + 4, 4, num_stages=STAGES):
        left = length - start - step
        a = row_at(x_at, 0, inside, left > 0).to(tl.float32)
        b = row_at(x_at, x_stride, inside, left > 1).to(tl.float32)
        c = row_at(x_at, 2 * x_stride, inside, left > 2).to(tl.float32)
        e = row_at(x_at, 3 * x_stride, inside, left > 3).to(tl.float32)
        ga = row_at(dy_at, 0, inside, left > 0)
        gb = row_at(dy_at, num_channels, inside, left > 1)
        gc = row_at(dy_at, 2 * num_channels, inside, left > 2)
        ge = row_at(dy_at, 3 * num_channels, inside, left > 3)
        x_at += 4 * x_stride
        dy_at += 4 * num_channels
        ga = dsilu(bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * a, ga)
        gb = dsilu(bias + w0 * x2 + w1 * x1 + w2 * a + w3 * b, gb)
        gc = dsilu(bias + w0 * x1 + w1 * a + w2 * b + w3 * c, gc)
        ge = dsilu(bias + w0 * a + w1 * b + w2 * c + w3 * e, ge)
        if step < RUN:
            dw0 = dw0 + ga * x3 + gb * x2 + gc * x1 + ge * a
            dw1 = dw1 + ga * x2 + gb * x1 + gc * a + ge * b
            dw2 = dw2 + ga * x1 + gb * a + gc * b + ge * c
            dw3 = dw3 + ga * a + gb * b + gc * c + ge * e
            dbias = dbias + ga + gb + gc + ge
        # dx of the three positions before and of this one, as far as they are this program's.
        here = tl.where(step > 0, left, -4)
        dx = (w0 * ga + w1 * g1 + w2 * g2 + w3 * g3).to(dx_ptr.dtype.element_ty)
        tl.store(dx_at - 3 * num_channels, dx, mask=inside & (here > -3))
        dx = (w0 * gb + w1 * ga + w2 * g1 + w3 * g2).to(dx_ptr.dtype.element_ty)
        tl.store(dx_at - 2 * num_channels, dx, mask=inside & (here > -2))
        dx = (w0 * gc + w1 * gb + w2 * ga + w3 * g1).to(dx_ptr.dtype.element_ty)
        tl.store(dx_at - num_channels, dx, mask=inside & (here > -1))
        dx = (w0 * ge + w1 * gc + w2 * gb + w3 * ga).to(dx_ptr.dtype.element_ty)
        tl.store(dx_at, dx, mask=inside & (left > 0) & (step < RUN))
        dx_at += 4 * num_channels
        x3, x2, x1 = b, c, e
        g3, g2, g1 = gb, gc, ge
    part_ptr = parts_ptr + (sample * tl.num_programs(1) + tl.program_id(1)) * 5 * num_channels
    taps = tl.reshape(tl.join(tl.join(dw0, dw2), tl.join(dw1, dw3)), (4 * BLOCK_C,))
    at = tl.program_id(0) * 4 * BLOCK_C + tl.arange(0, 4 * BLOCK_C)
    tl.store(part_ptr + at, taps, mask=at < 4 * num_channels)
    tl.store(part_ptr + 4 * num_channels + channel, dbias, mask=inside)
