"""Every Triton kernel of the catalog interpreted on a CPU, on small cases: close to the reference in fp64.

Compiled, and on all cases, they are tested by test_conformance.py on GPUs. Interpreted bf16 products are no numbers.
"""

from __future__ import annotations

import json

import pytest

from tests.ops.calls import interpreted

MOST, ELEMENTS = 2, 700
"""Cases of an op, the largest ones of at most so many elements."""
FURTHER = {"cross_entropy_stats": ["masked"], "activation": ["swiglu-narrow"]}


def test_kernels_are_close_to_the_reference() -> None:
    """Controls of the comparison: test_controls.py."""
    pytest.importorskip("triton")
    (line,) = interpreted(f"""
import json
import torch
from megatron.core.ops.catalog import ALL_OPS
from tests.ops.test_conformance import seeded_cases, tensors_in, unlike_reference

def size(case):
    return sum(tensor.numel() for tensor in tensors_in([*case.args, *case.kwargs.values()]))

torch.use_deterministic_algorithms(True)
cpu, far, tried = torch.device("cpu"), [], {{}}
for op in ALL_OPS:
    variant = op.variants[0]
    if variant.name != "deterministic_triton" or torch.float32 not in variant.dtypes:
        continue
    cases = sorted(seeded_cases(op.spec, torch.float32, cpu), key=size)
    small = [case.name for case in cases if size(case) <= {ELEMENTS}][-{MOST}:] or [cases[0].name]
    tried[op.spec.name] = small + {FURTHER}.get(op.spec.name, [])
    wrong = unlike_reference(op, variant.fn, torch.float32, cpu, tried[op.spec.name])
    far += [op.spec.name + ": " + words for words in wrong]
print(json.dumps([tried, far]))
""")
    tried, far = json.loads(line)
    assert far == []
    assert len(tried) > 20 and all(tried.values())
