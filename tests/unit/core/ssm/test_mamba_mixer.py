"""The mixer against the recurrence, position by position."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu, softplus

from megatron.core.contracts.batch import Microbatch, StageReport
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.mamba_params import MambaSizes
from tests.support.ranks import groups_for_test
from tests.support.tiny import tiny_config, tiny_context

MICROBATCH = Microbatch(iteration=1, shard=0, index=0, num_microbatches=1)


def _recurrence(layer: MambaMixer, x: torch.Tensor, sizes: MambaSizes) -> torch.Tensor:
    """[S, B, H] in fp64: one state per head, one position after the other."""
    double = {name: p.detach().double() for name, p in layer.named_parameters()}
    wide = x.double().transpose(0, 1)
    normed = rms_norm(wide, wide.shape[-1:], double["in_proj.layer_norm_weight"], 1e-5)
    z, conv, dt = (normed @ double["in_proj.weight"].t()).split(
        [sizes.inner, sum(sizes.conv_parts), sizes.heads], dim=-1
    )
    padded = torch.nn.functional.pad(conv, (0, 0, 3, 0))
    taps = double["conv1d_weight"].squeeze(1)
    conv = silu(sum(padded[:, i : i + conv.shape[1]] * taps[:, i] for i in range(4)) + double["conv1d_bias"])
    values, b, c = conv.split(sizes.conv_parts, dim=-1)
    batch, length = values.shape[:2]
    values = values.view(batch, length, sizes.heads, sizes.head_dim)
    b, c = (
        t.view(batch, length, sizes.groups, sizes.state).repeat_interleave(sizes.heads // sizes.groups, dim=2)
        for t in (b, c)
    )
    dt = softplus(dt + double["dt_bias"])
    state, out = torch.zeros(batch, sizes.heads, sizes.head_dim, sizes.state, dtype=torch.float64), []
    for t in range(length):
        decay = torch.exp(-torch.exp(double["A_log"]) * dt[:, t])
        added = (dt[:, t, :, None] * values[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(-2)
        state = state * decay[..., None, None] + added
        out.append((state @ c[:, t].unsqueeze(-1)).squeeze(-1) + double["D"][:, None] * values[:, t])
    gated = torch.stack(out, dim=1).flatten(2) * silu(z)
    grouped = gated.unflatten(-1, (sizes.groups, -1))
    normal = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + 1e-5)).flatten(2)
    return ((normal * double["norm.weight"]) @ double["out_proj.weight"].t()).transpose(0, 1)


@pytest.mark.parametrize("length", [1, 7, 128, 200])
def test_agrees_with_the_recurrence(length: int) -> None:
    config = tiny_config()
    layer = MambaMixer("mixer", 0, config, tiny_context(groups_for_test()))
    layer.D.data.normal_()
    layer.norm.weight.data.normal_()
    x = torch.randn(length, 2, 64)
    got = layer(x, MICROBATCH, StageReport())
    want = _recurrence(layer, x, MambaSizes(heads=8, head_dim=16, groups=2, state=16))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="8 Mamba heads in 3 groups"):
        MambaMixer("mixer", 0, tiny_config(mamba_num_groups=3), tiny_context(groups_for_test()))


def test_parts_of_the_projection() -> None:
    sizes = MambaSizes(heads=64, head_dim=64, groups=8, state=128)
    assert sum(sizes.in_proj_parts) == 10304
    assert sum(sizes.conv_parts) == 6144
    assert sizes.local(8).in_proj_parts == (512, 512, 128, 128, 8)
