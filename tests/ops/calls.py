"""Calling a variant on a case, and cutting a case into pieces, for the conformance tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.ops.registry import Case, Cut, OpSpec

Position = int | str

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a call left behind: results and changed arguments, then gradients by the argument they belong to."""

    results: tuple[torch.Tensor, ...]
    grads: dict[Position, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.results, *self.grads.values()]


def seeded_cases(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> list[Case]:
    return spec.cases(torch.Generator().manual_seed(11), dtype, device)


def arguments(case: Case) -> dict[Position, object]:
    return {**dict(enumerate(case.args)), **case.kwargs}


def with_arguments(case: Case, values: dict[Position, object]) -> Case:
    args = tuple(values[i] for i in range(len(case.args)))
    kwargs = {name: values[name] for name in case.kwargs}
    return Case(name=case.name, args=args, kwargs=kwargs, grads=case.grads, writes=case.writes)


def in_double(case: Case) -> Case:
    """The case with every floating-point tensor in fp64, exactly."""
    double = {
        at: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for at, v in arguments(case).items()
    }
    return with_arguments(case, double)


def copied(value: object) -> object:
    """A copy with the same strides; written arguments and leaves must not be shared between calls."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def cotangents(case: Case, results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Gradients of the results: the same values whatever the type the results have."""
    generator = torch.Generator().manual_seed(len(case.name))
    return [torch.randn(r.shape, generator=generator).bfloat16().to(r.dtype).to(r.device) for r in results]


def call(fn: Callable[..., object], case: Case, cotangent: list[torch.Tensor] | None = None) -> Outcome:
    """Run forward and, where the case has gradients, backward."""
    values = {at: copied(v) for at, v in arguments(case).items()}
    for at in case.grads:
        values[at].requires_grad_(True)
    out = fn(*[values[i] for i in range(len(case.args))], **{name: values[name] for name in case.kwargs})
    results = () if out is None else (out,) if isinstance(out, torch.Tensor) else tuple(out)
    grads = {}
    if case.grads:
        given = zip(results, cotangent or cotangents(case, results), strict=True)
        wide, upstream = zip(*[pair for pair in given if pair[0].is_floating_point()], strict=True)
        found = torch.autograd.grad(wide, [values[at] for at in case.grads], upstream)
        grads = dict(zip(case.grads, found, strict=True))
    written = tuple(values[at] for at in case.writes)
    return Outcome(tuple(r.detach() for r in results) + written, grads)


def piece(case: Case, cut: Cut, start: int, stop: int) -> Case:
    values = dict(arguments(case))
    for at, dim in cut.args.items():
        if isinstance(values.get(at), torch.Tensor):
            values[at] = values[at].narrow(dim, start, stop - start)
    small = with_arguments(case, values)
    if cut.adjust is None:
        return small
    args = cut.adjust(list(small.args), start, stop)
    return with_arguments(small, {**dict(enumerate(args)), **small.kwargs})


def bounds(case: Case, cut: Cut) -> list[tuple[int, int]]:
    """Uneven pieces: one unit, about half of the rest, the rest; none where there is nothing to cut."""
    at, dim = next(iter(cut.args.items()))
    size = arguments(case)[at].shape[dim]
    first = min(size, cut.unit)
    middle = first + (size - first) // cut.unit // 2 * cut.unit
    edges = sorted({0, first, middle, size})
    return list(zip(edges, edges[1:], strict=False))


def cut_outcomes(
    fn: Callable[..., object], case: Case, cut: Cut, whole: Outcome
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, pieces put together, the whole call's) for every result and every gradient of a cut argument."""
    full = cotangents(case, whole.results) if case.grads else None
    outs, outcomes = cut.outs[: len(whole.results)], []
    for start, stop in bounds(case, cut):
        part = None if full is None else [c.narrow(dim, start, stop - start) for c, dim in zip(full, outs, strict=True)]
        outcomes.append(call(fn, piece(case, cut, start, stop), part))
    for i, dim in enumerate(outs):
        parts = [o.results[i] for o in outcomes]
        yield f"result {i}", sum(parts[1:], parts[0]) if dim is None else torch.cat(parts, dim), whole.results[i]
    for at in case.grads:
        if at in cut.args:
            yield f"gradient of {at}", torch.cat([o.grads[at] for o in outcomes], cut.args[at]), whole.grads[at]


INTERPRETER = """
from triton.runtime import interpreter

def set_attr(scope, obj, name, value, given=interpreter._LangPatchScope.set_attr):
    given(scope, obj, name, (lambda one: one.handle.data.item()) if name == "__index__" else value)

interpreter._LangPatchScope.set_attr = set_attr
"""
"""Bounds of loops are arrays of one number to the interpreter, which NumPy does not take for that number any more."""


def interpreted(code: str) -> list[str]:
    """Lines that ``code`` prints in a process of its own where Triton's kernels are interpreted: they are compiled or
    interpreted as the environment says when they are loaded."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETER + code],
        cwd=ROOT,
        env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def interpreted_unlike_reference(op: str, *only: str) -> list[str]:
    """What is not close to the reference where an op's Triton variant is interpreted, as a line of text."""
    return interpreted(f"""
import torch
from megatron.core.ops.{op} import OP
from tests.ops.test_conformance import unlike_reference
print(unlike_reference(OP, OP.variant("deterministic_triton").fn, torch.float32, torch.device("cpu"), {only}))
""")
