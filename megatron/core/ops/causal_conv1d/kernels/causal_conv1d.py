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
def causal_conv1d_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
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
    for step in tl.range(0, RUN, loop_unroll_factor=UNROLL):
        position = start + step
        x0 = row_at(x_ptr, position, channel, length, num_channels, x_stride)
        total = bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
        inside = (channel < num_channels) & (position < length)
        y = (total * tl.sigmoid(total)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + position * num_channels + channel, y, mask=inside)
        x3 = x2
        x2 = x1
        x1 = x0


@triton.jit
def causal_conv1d_bwd_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, dx_ptr, parts_ptr, length, num_channels, batch_stride, x_stride,
    W: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
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
    for step in tl.range(0, RUN + 3, loop_unroll_factor=UNROLL):
        position = start + step
        x0 = row_at(x_ptr, position, channel, length, num_channels, x_stride)
        dy = row_at(dy_ptr, position, channel, length, num_channels, num_channels)
        total = bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
        sigmoid = tl.sigmoid(total)
        g0 = dy * (sigmoid + total * sigmoid * (1.0 - sigmoid))
        own = tl.where(step < RUN, g0, 0.0)
        dw0 += own * x3
        dw1 += own * x2
        dw2 += own * x1
        dw3 += own * x0
        dbias += own
        dx = w0 * g0 + w1 * g1 + w2 * g2 + w3 * g3
        inside = (channel < num_channels) & (step >= 3) & (position - 3 < length)
        tl.store(dx_ptr + (position - 3) * num_channels + channel, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        x3 = x2
        x2 = x1
        x1 = x0
        g3 = g2
        g2 = g1
        g1 = g0
    part_ptr = parts_ptr + (sample * tl.num_programs(1) + run) * 5 * num_channels + channel
    inside = channel < num_channels
    tl.store(part_ptr, dw0, mask=inside)
    tl.store(part_ptr + num_channels, dw1, mask=inside)
    tl.store(part_ptr + 2 * num_channels, dw2, mask=inside)
    tl.store(part_ptr + 3 * num_channels, dw3, mask=inside)
    tl.store(part_ptr + 4 * num_channels, dbias, mask=inside)
