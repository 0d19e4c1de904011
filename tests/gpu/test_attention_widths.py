"""The widest and the narrowest heads that variants of attention take on a GPU, and which variant other widths get."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.digest.bits import same_bits
from megatron.core.ops.attention import OP
from megatron.core.ops.registry import Case, Variant, build_table
from tests.ops.calls import call, in_double

pytestmark = pytest.mark.gpu
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
LIMITED = [v for v in OP.variants if v.head_widths is not None and "cuda" in v.guarantee and v.outside is None]


@pytest.mark.parametrize(
    ("variant", "width"), [(v, v.head_widths[end]) for v in LIMITED for end in (0, -1)], ids=lambda of: str(of)[:60]
)
def test_ends_of_the_range_are_close_to_the_reference_and_repeat(variant: Variant, width: int) -> None:
    torch.manual_seed(3)
    q_SBND = torch.randn(300, 2, 4, width, device=DEVICE).to(BF16)
    k_SBGD, v_SBGD = torch.randn(2, 300, 2, 2, width, device=DEVICE).to(BF16)
    case = Case(name=f"width {width}", args=(q_SBND, k_SBGD, v_SBGD, width**-0.5), grads=(0, 1, 2))
    found, exact = call(variant.fn, case).tensors(), call(OP.variants[-1].fn, in_double(case)).tensors()
    for mine, true in zip(found, exact, strict=True):
        assert (mine.double() - true).abs().max() <= 2e-2 * true.abs().max().clamp(min=1.0)
    for _ in range(4):
        assert all(map(same_bits, found, call(variant.fn, case).tensors()))


@pytest.mark.parametrize(
    ("width", "name"), [(256, "deterministic_torch_flash"), (20, "deterministic"), (264, "deterministic")]
)
def test_other_widths_get_another_variant(width: int, name: str) -> None:
    strict = NumericsConfig(deterministic_mode=True)
    assert build_table([OP], strict, DEVICE, BF16, width).chosen["attention"].name == name
