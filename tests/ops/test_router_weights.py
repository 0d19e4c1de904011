"""On the CPU the weights of chosen experts have the bits of torch's own operations; interpreted, the kernels agree."""

from __future__ import annotations

import pytest
import torch

from megatron.core.digest.bits import same_bits
from megatron.core.ops.availability import installed
from megatron.core.ops.router_weights import OP
from megatron.core.ops.router_weights.deterministic import router_weights
from tests.ops.calls import call, in_double, interpreted_unlike_reference, seeded_cases


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_the_kernels_are_close_to_the_reference_where_they_are_interpreted() -> None:
    assert interpreted_unlike_reference("router_weights") == ["[]"]


def _composed(score_TE: torch.Tensor, ids_Tk: torch.Tensor, normalise: bool, factor: float | None) -> torch.Tensor:
    weight_Tk = score_TE.gather(1, ids_Tk)
    if normalise:
        weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_Tk if factor is None else weight_Tk * factor


def test_bits_are_those_of_torch_operations_on_the_cpu() -> None:
    for case in seeded_cases(OP.spec, torch.float32, torch.device("cpu")):
        for left, right in zip(call(router_weights, case).tensors(), call(_composed, case).tensors(), strict=True):
            assert same_bits(left + 0.0, right + 0.0), case.name  # scatter keeps -0.0, which torch's addition makes 0.0


def test_gradients_in_fp64_are_those_of_the_definition() -> None:
    for case in map(in_double, seeded_cases(OP.spec, torch.float32, torch.device("cpu"))):
        got, want = call(router_weights, case), call(OP.variants[-1].fn, case)
        for left, right in zip(got.tensors(), want.tensors(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_places_of_experts_that_were_not_chosen_get_no_gradient() -> None:
    score_TE = torch.rand(9, 6, requires_grad=True)
    ids_Tk = torch.tensor([[1, 4]]).expand(9, 2)
    router_weights(score_TE, ids_Tk, True, None)[:, 0].sum().backward()
    assert (score_TE.grad != 0).tolist() == [[False, True, False, False, True, False]] * 9
