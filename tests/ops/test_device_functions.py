"""Kernels that share ``device_functions`` agree with the reference where they are interpreted, also far out."""

from __future__ import annotations

import pytest

from megatron.core.ops.availability import installed
from tests.ops.calls import interpreted

SMALL = """
import torch
from triton.runtime import interpreter
from megatron.core.ops import launch
from megatron.core.ops.catalog import ALL_OPS
from tests.ops.calls import call, in_double, seeded_cases
from tests.ops.test_conformance import distance

patch = interpreter._patch_lang_tensor
def loops_end_at_numbers(tensor, scope):  # the interpreter's own conversion is one that numpy 2.4 refuses
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = loops_end_at_numbers

short = {"RUN": 4, "BLOCK_C": 32, "num_warps": 1}
launch.TABLE = {
    ("causal_conv1d_fwd", "", (64, 4)): short,
    ("causal_conv1d_bwd", "", (64, 4)): {**short, "STAGES": 1},
    ("rms_norm_bwd", "", (64, 4)): {"ROWS": 2, "PIECE": 16, "STAGES": 1, "PROGRAMS": 3, "num_warps": 1},
}
wanted = {"rms_norm": ("(5,", "(7,"), "gated_rms_norm": ("(3,",), "rope": ("(5,",), "causal_conv1d": ("B2-S9-",)}
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
for op in ALL_OPS:
    if op.spec.name in wanted:
        fn, dtype = op.variant("deterministic_triton").fn, torch.float32
        for case in seeded_cases(op.spec, dtype, torch.device("cpu")):
            if case.name.startswith(wanted[op.spec.name]):
                got, want = call(fn, case).tensors(), call(op.variants[-1].fn, in_double(case)).tensors()
                wrong = [distance(g, w, op.spec.tolerance[dtype]) for g, w in zip(got, want, strict=True)]
                print(op.spec.name, case.name, *(["close"] if wrong == [None] * len(got) else wrong))
"""
FAR = """
import math, torch
from megatron.core.ops.causal_conv1d.deterministic_triton import causal_conv1d
far = torch.tensor([-1e38, -1e4, -90.0, 90.0, 1e4, 1e38, math.inf, math.nan])
near = torch.linspace(-16.0, 16.0, 1016)
x = torch.cat((far, near)).view(1, 1, -1)
y = causal_conv1d(x, torch.ones(1024, 1), torch.zeros(1024)).view(-1)
want = torch.nn.functional.silu(near.double())
print(y[:8].tolist())
print(float(((y[8:].double() - want) / want).abs().max()) < 2e-6)
"""


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_kernels_agree_with_the_definition_where_they_are_interpreted():
    lines = interpreted(SMALL)
    assert len(lines) == 6
    assert [line for line in lines if not line.endswith(" close")] == []


@pytest.mark.skipif(not installed("triton"), reason="needs triton")
def test_the_short_sigmoid_has_the_limits_and_six_digits():
    assert interpreted(FAR) == ["[-0.0, -0.0, -0.0, 90.0, 10000.0, 9.999999680285692e+37, inf, nan]", "True"]
