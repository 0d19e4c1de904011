# Order of addition: bias first, then taps ascending; parameter gradients: a program adds its positions ascending into
# its own partial, and partials are added in program order by column_sum.
"""Causal depthwise convolution over up to four positions, with SiLU; channels are adjacent in memory.

A window of W < 4 positions is one of four whose first taps are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tap_weight(weight_ptr, channel, num_channels, tap: tl.constexpr, W: tl.constexpr):
    """Weight of tap 0..3 of the padded window, fp32."""
    if tap < 4 - W:
        return tl.zeros(channel.shape, dtype=tl.float32)
    return tl.load(weight_ptr + channel * W + (tap + W - 4), mask=channel < num_channels, other=0.0).to(tl.float32)


@triton.jit
def row_at(ptr, position, channel, length, num_channels, stride):
    """One position of a tile of channels in fp32; zeros outside the sequence."""
    inside = (channel < num_channels) & (position >= 0) & (position < length)
    return tl.load(ptr + position * stride + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_silu(ptr, total, mask):
    """silu(total), rounded to the type of the output."""
    tl.store(ptr, (total * tl.sigmoid(total)).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def causal_conv1d_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = silu(conv). Grid: channel tiles, runs of positions, samples."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.program_id(1).to(tl.int64) * RUN
    sample = tl.program_id(2).to(tl.int64)
    x_ptr += sample * batch_stride
    y_ptr += sample * length * num_channels
    bias = tl.load(bias_ptr + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    w0 = tap_weight(weight_ptr, channel, num_channels, 0, W)
    w1 = tap_weight(weight_ptr, channel, num_channels, 1, W)
    w2 = tap_weight(weight_ptr, channel, num_channels, 2, W)
    w3 = tap_weight(weight_ptr, channel, num_channels, 3, W)
    x1 = row_at(x_ptr, start - 1, channel, length, num_channels, x_stride)
    x2 = row_at(x_ptr, start - 2, channel, length, num_channels, x_stride)
    x3 = row_at(x_ptr, start - 3, channel, length, num_channels, x_stride)
    y_at = y_ptr + start * num_channels + channel
    for step in tl.range(0, RUN, 4, num_stages=STAGES):
        position = start + step
        a = row_at(x_ptr, position, channel, length, num_channels, x_stride)
        b = row_at(x_ptr, position + 1, channel, length, num_channels, x_stride)
        c = row_at(x_ptr, position + 2, channel, length, num_channels, x_stride)
        e = row_at(x_ptr, position + 3, channel, length, num_channels, x_stride)
        left = tl.where(channel < num_channels, length - position, 0)
        store_silu(y_at, bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * a, left > 0)
        store_silu(y_at + num_channels, bias + w0 * x2 + w1 * x1 + w2 * a + w3 * b, left > 1)
        store_silu(y_at + 2 * num_channels, bias + w0 * x1 + w1 * a + w2 * b + w3 * c, left > 2)
        store_silu(y_at + 3 * num_channels, bias + w0 * a + w1 * b + w2 * c + w3 * e, left > 3)
        y_at += 4 * num_channels
        x3, x2, x1 = b, c, e


@triton.jit
def dsilu(total, dy):
    """Gradient of silu(total)."""
    sigmoid = tl.sigmoid(total)
    return dy * (sigmoid + total * sigmoid * (1.0 - sigmoid))


@triton.jit
def causal_conv1d_bwd_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, dx_ptr, parts_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and this program's partial [5, C] of the gradients of the four taps and the bias.

    The gradient of a position needs the three positions after it, so a program reads three more than its run.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    run = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    start = run * RUN
    x_ptr += sample * batch_stride
    dy_ptr += sample * length * num_channels
    dx_ptr += sample * length * num_channels
    bias = tl.load(bias_ptr + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    w0 = tap_weight(weight_ptr, channel, num_channels, 0, W)
    w1 = tap_weight(weight_ptr, channel, num_channels, 1, W)
    w2 = tap_weight(weight_ptr, channel, num_channels, 2, W)
    w3 = tap_weight(weight_ptr, channel, num_channels, 3, W)
    x1 = row_at(x_ptr, start - 1, channel, length, num_channels, x_stride)
    x2 = row_at(x_ptr, start - 2, channel, length, num_channels, x_stride)
    x3 = row_at(x_ptr, start - 3, channel, length, num_channels, x_stride)
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
        position = start + step
        a = row_at(x_ptr, position, channel, length, num_channels, x_stride)
        b = row_at(x_ptr, position + 1, channel, length, num_channels, x_stride)
        c = row_at(x_ptr, position + 2, channel, length, num_channels, x_stride)
        e = row_at(x_ptr, position + 3, channel, length, num_channels, x_stride)
        ga = row_at(dy_ptr, position, channel, length, num_channels, num_channels)
        gb = row_at(dy_ptr, position + 1, channel, length, num_channels, num_channels)
        gc = row_at(dy_ptr, position + 2, channel, length, num_channels, num_channels)
        ge = row_at(dy_ptr, position + 3, channel, length, num_channels, num_channels)
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
        here = dx_ptr + position * num_channels + channel
        left = tl.where((channel < num_channels) & (step > 0), length - position, -4)
        dx = (w0 * ga + w1 * g1 + w2 * g2 + w3 * g3).to(dx_ptr.dtype.element_ty)
        tl.store(here - 3 * num_channels, dx, mask=left > -3)
        dx = (w0 * gb + w1 * ga + w2 * g1 + w3 * g2).to(dx_ptr.dtype.element_ty)
        tl.store(here - 2 * num_channels, dx, mask=left > -2)
        dx = (w0 * gc + w1 * gb + w2 * ga + w3 * g1).to(dx_ptr.dtype.element_ty)
        tl.store(here - num_channels, dx, mask=left > -1)
        dx = (w0 * ge + w1 * gc + w2 * gb + w3 * ga).to(dx_ptr.dtype.element_ty)
        tl.store(here, dx, mask=(channel < num_channels) & (position < length) & (step < RUN))
        x3, x2, x1 = b, c, e
        g3, g2, g1 = gb, gc, ge
    part_ptr = parts_ptr + (sample * tl.num_programs(1) + run) * 5 * num_channels + channel
    inside = channel < num_channels
    tl.store(part_ptr, dw0, mask=inside)
    tl.store(part_ptr + num_channels, dw1, mask=inside)
    tl.store(part_ptr + 2 * num_channels, dw2, mask=inside)
    tl.store(part_ptr + 3 * num_channels, dw3, mask=inside)
    tl.store(part_ptr + 4 * num_channels, dbias, mask=inside)
