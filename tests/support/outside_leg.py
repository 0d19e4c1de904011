"""One process that tests one outside variant: ``python -m tests.support.outside_leg OP=VARIANT``.

A package is in one mode in a process, and mixing it into the tests' own would fix that for all of them. Prints a JSON
object: cases too far from the reference, cases whose bits differ between replays, and the package with its version.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Op, build_table
from megatron.training.setup.determinism import enter_deterministic_mode
from tests.ops.calls import call, in_double, seeded_cases
from tests.ops.test_conformance import changing_bits, distance
from tools.bench.ops import replays_agree, runs
from tools.bench.shapes import WORKLOADS

BF16, DEVICE = torch.bfloat16, torch.device("cuda")


def first_case(op: Op) -> Op:
    """The op with its first case only: a package that times its launches does so for every size."""
    return replace(op, spec=replace(op.spec, cases=lambda *given: op.spec.cases(*given)[:1]))


def far_from_the_reference(op: Op, fn: object) -> list[str]:
    """Cases in which ``fn`` is too far from the reference in fp64 on the CPU."""
    tolerance, wrong = op.spec.tolerance[BF16], []
    places = (torch.device("cpu"), DEVICE)
    for on_cpu, case in zip(*(seeded_cases(op.spec, BF16, place) for place in places), strict=True):
        want = call(op.variants[-1].fn, in_double(on_cpu)).tensors()
        for left, right in zip(call(fn, case).tensors(), want, strict=True):
            problem = distance(left, right, tolerance)
            if problem:
                wrong.append(f"{case.name}: {problem}")
    return wrong


def main(choice: str) -> None:
    name, _, variant_name = choice.partition("=")
    (op,) = [op for op in ALL_OPS if op.spec.name == name]
    variant = op.variant(variant_name)
    strict = variant.outside.fits(strict=True)
    if strict:
        enter_deterministic_mode()
    table = build_table(ALL_OPS, NumericsConfig(deterministic_mode=strict, op_variants=choice), DEVICE, BF16)
    fn = table[name]
    if not strict:
        op = first_case(op)
    found = {"package": table.manifest()[name]["package"], "promise": variant.guarantee["cuda"].name}
    found |= {"far": far_from_the_reference(op, fn), "changing": changing_bits(op, fn, BF16, DEVICE)}
    if strict:
        work = WORKLOADS[name]()[0]
        forward, both = runs(variant, work)
        found["replays at " + work.label] = replays_agree(variant, work, both or forward)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
