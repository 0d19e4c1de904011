"""Every registered variant keeps what it claims: close to the reference in fp64, and the bits its guarantee promises.

Nothing here names an op: a variant is tested because it is in the catalog. Those of outside packages are tested in
processes of their own (tests/gpu/test_outside.py): which libraries a process can load depends on what it has loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from megatron.core.digest.bits import first_difference, same_bits
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.registry import Cut, Guarantee, Op, Tolerance, Variant
from tests.ops.calls import Outcome, bounds, call, cut_outcomes, in_double, seeded_cases

DTYPES = (torch.float32, torch.bfloat16)
REPEATS = 5


def _params(least: Guarantee) -> list:
    """One parameter per op, variant, type and device for variants that promise at least ``least``."""
    return [
        pytest.param(
            op,
            variant,
            dtype,
            torch.device(device),
            id=f"{op.spec.name}-{variant.name}-{str(dtype).removeprefix('torch.')}-{device}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for op in ALL_OPS
        for variant in op.variants
        for device, guarantee in variant.guarantee.items()
        for dtype in DTYPES
        if variant.outside is None and guarantee >= least and dtype in variant.dtypes
    ]


EVERY = pytest.mark.parametrize(("op", "variant", "dtype", "device"), _params(Guarantee.NONE))
REPEATABLE = pytest.mark.parametrize(("op", "variant", "dtype", "device"), _params(Guarantee.RUN_TO_RUN))
CUTTABLE = pytest.mark.parametrize(("op", "variant", "dtype", "device"), _params(Guarantee.BATCH))


@pytest.fixture
def poisoned():
    """Deterministic algorithms and NaN in memory that nobody wrote; on the GPU too."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@functools.cache
def _expected(name: str, dtype: torch.dtype) -> list[Outcome]:
    """The reference in fp64 for every case, on the CPU's copy of the same inputs."""
    (op,) = [op for op in ALL_OPS if op.spec.name == name]
    cases = seeded_cases(op.spec, dtype, torch.device("cpu"))
    return [call(op.variants[-1].fn, in_double(case)) for case in cases]


def distance(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> str | None:
    """What is wrong with ``got``, or ``None``."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.is_floating_point():
        return None if torch.equal(got.cpu(), want) else "integers differ"
    got, want = got.double().cpu(), want.cpu()
    if not got.numel():
        return None
    special = ~want.isfinite()
    if not torch.equal(got[special], want[special]) and not torch.equal(got[special].isnan(), want[special].isnan()):
        return "infinities or NaN differ"
    size = max(1.0, float(want[~special].abs().max())) if bool((~special).any()) else 1.0
    over = (got - want).abs() - (tolerance.rtol * want.abs() + tolerance.atol * size)
    over = torch.where(special, -1.0, over)
    if bool((over > 0).any()) or bool(over.isnan().any()):
        worst = int(over.nan_to_num(nan=float("inf")).argmax())
        return f"{got.flatten()[worst].item()!r}, not {want.flatten()[worst].item()!r} (at {worst}, size {size:g})"
    return None


def unlike_reference(
    op: Op, fn: Callable[..., object], dtype: torch.dtype, device: torch.device, only: Iterable[str] = ()
) -> list[str]:
    """Cases, of those named in ``only`` if any are, in which ``fn`` is too far from the reference in fp64."""
    tolerance, wrong = op.spec.tolerance[dtype], []
    for case, want in zip(seeded_cases(op.spec, dtype, device), _expected(op.spec.name, dtype), strict=True):
        if only and case.name not in only:
            continue
        got = call(fn, case)
        for left, right in zip(got.tensors(), want.tensors(), strict=True):
            problem = distance(left, right, tolerance)
            if problem:
                wrong.append(f"{case.name}: {problem}")
    return wrong


def changing_bits(op: Op, fn: Callable[..., object], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Cases whose bits differ between repeats."""
    wrong = []
    for case in seeded_cases(op.spec, dtype, device):
        first = call(fn, case).tensors()
        for _ in range(REPEATS - 1):
            for left, right in zip(first, call(fn, case).tensors(), strict=True):
                if not same_bits(left, right):
                    wrong.append(f"{case.name}: {first_difference(left, right)}")
    return wrong


def bits_that_depend_on_a_cut(
    op: Op, fn: Callable[..., object], cut: Cut, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Cases in which pieces put together differ from the whole call."""
    wrong = []
    for case in seeded_cases(op.spec, dtype, device):
        if not bounds(case, cut):
            continue
        for what, left, right in cut_outcomes(fn, case, cut, call(fn, case)):
            if not same_bits(left, right):
                wrong.append(f"{case.name}, {cut.name}, {what}: {first_difference(left, right)}")
    return wrong


@EVERY
def test_close_to_the_reference_in_fp64(poisoned, op: Op, variant: Variant, dtype, device):
    assert unlike_reference(op, variant.fn, dtype, device) == []


@REPEATABLE
def test_same_bits_in_every_run(poisoned, op: Op, variant: Variant, dtype, device):
    assert changing_bits(op, variant.fn, dtype, device) == []


@CUTTABLE
def test_same_bits_for_every_cut(poisoned, op: Op, variant: Variant, dtype, device):
    level = variant.guarantee[device.type]
    cuts = [cut for cut in op.spec.cuts if cut.level <= level]
    assert any(cut.level == level for cut in cuts) or level > max(c.level for c in cuts), "no cut tests this claim"
    for cut in cuts:
        assert bits_that_depend_on_a_cut(op, variant.fn, cut, dtype, device) == []


@EVERY
def test_like_the_reference_on_the_same_device(poisoned, op: Op, variant: Variant, dtype, device):
    """Types and shapes agree; where the spec says ``exact``, every bit does."""
    for case in seeded_cases(op.spec, dtype, device):
        got, want = call(variant.fn, case).tensors(), call(op.variants[-1].fn, case).tensors()
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want], case.name
        if op.spec.exact:
            differences = [first_difference(a, b) for a, b in zip(got, want, strict=True) if not same_bits(a, b)]
            assert [str(d) for d in differences] == [], case.name


def tensors_in(args: Iterable[object]) -> Iterator[torch.Tensor]:
    """Tensors among the arguments of a case, and in lists of tensors among them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.spec.name)
def test_cases_cover_odd_and_empty_sizes(op: Op):
    cases = seeded_cases(op.spec, torch.float32, torch.device("cpu"))
    assert len({case.name for case in cases}) == len(cases) > 1
    tensors = [list(tensors_in(case.args)) for case in cases]
    assert any(t.numel() == 0 for case in tensors for t in case), "no empty case"
    assert any(size % 2 for case in tensors for t in case for size in t.shape), "no odd size"
    assert all(op.spec.tolerance[dtype].reason for dtype in DTYPES)
