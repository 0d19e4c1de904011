"""Direct launches on the GPU: the bytes that Triton's own launches leave, wherever and in whatever order they are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction

from megatron.core.digest.bits import same_bits
from megatron.core.ops import direct_launch
from megatron.core.ops.catalog import ALL_OPS
from megatron.core.ops.direct_launch import run_kernel
from megatron.core.ops.registry import Case, Variant
from tests.ops.calls import call, seeded_cases

pytestmark = pytest.mark.gpu

OPS = {op.spec.name: op for op in ALL_OPS if op.variants[0].name == "deterministic_triton"}
SHIFTED = ("rms_norm", "gated_rms_norm", "activation", "rope", "moe_permute", "ssd_scan")
LAUNCHES = 2000


def variant_of(name: str) -> Variant:
    return OPS[name].variants[0]


def cases_of(name: str, device: str = "cuda") -> list[Case]:
    """The op's cases in all types: of odd sizes, strided ones, and of many numbers of rows."""
    types = [dtype for dtype in OPS[name].spec.tolerance if dtype in variant_of(name).dtypes]
    return [case for dtype in types for case in seeded_cases(OPS[name].spec, dtype, torch.device(device))]


def outcomes(fn: Callable[..., object], cases: list[Case]) -> list[list[torch.Tensor]]:
    return [call(fn, case).tensors() for case in cases]


@pytest.fixture
def by_triton(monkeypatch) -> Callable[..., list[list[torch.Tensor]]]:
    """``outcomes`` by Triton's launches alone, and once more, so that every key is known; Triton is off after that."""
    monkeypatch.setattr(direct_launch, "_KERNELS", {})

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise AssertionError(f"{self.__name__} was launched by Triton")

    def run(fn: Callable[..., object], cases: list[Case]) -> list[list[torch.Tensor]]:
        seen: list[str] = []

        def hook(metadata: Any) -> None:
            seen.append(metadata.get()["name"])

        knobs.runtime.launch_enter_hook.add(hook)
        try:
            found = outcomes(fn, cases)
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        assert seen
        assert not any(known.compiled for known in direct_launch._KERNELS.values())
        outcomes(fn, cases)
        monkeypatch.setattr(JITFunction, "run", refuse)
        return found

    return run


def differing(cases: list[Case], expected: list[list[torch.Tensor]], found: list[list[torch.Tensor]]) -> list[str]:
    return [
        case.name
        for case, left, right in zip(cases, expected, found, strict=True)
        if not all(same_bits(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True))
    ]


@pytest.mark.parametrize("name", OPS)
def test_every_case_has_the_same_bytes_in_any_order_and_on_another_stream(by_triton, name: str) -> None:
    fn, cases = variant_of(name).fn, cases_of(name)
    expected = by_triton(fn, cases)
    assert differing(cases, expected, outcomes(fn, cases)) == []
    assert differing(cases[::-1], expected[::-1], outcomes(fn, cases[::-1])) == []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = outcomes(fn, cases)
    side.synchronize()
    assert differing(cases, expected, found) == []


def shifted(value: Any) -> Any:
    """A copy, contiguous, that begins one element behind a multiple of 16 bytes."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    moved = value.new_empty(value.numel() + 1)[1:].view(value.shape)
    return moved.copy_(value)


@pytest.mark.parametrize("name", SHIFTED)
def test_arguments_that_are_not_aligned_in_between(by_triton, name: str) -> None:
    plain, cases = variant_of(name).fn, cases_of(name)

    def moved(*args: Any, **kwargs: Any) -> object:
        return plain(*map(shifted, args), **{key: shifted(value) for key, value in kwargs.items()})

    count = iter(range(1 << 20))

    def in_turn(*args: Any, **kwargs: Any) -> object:
        return (moved if next(count) % 2 else plain)(*args, **kwargs)

    twice = [case for case in cases for _ in range(2)]
    expected = by_triton(in_turn, twice)
    assert differing(twice, expected, outcomes(in_turn, twice)) == []
    compiled = [len(known.compiled) for known in direct_launch._KERNELS.values()]
    assert min(compiled) > 0


def test_a_launch_goes_to_the_current_stream() -> None:
    fn, case = variant_of("rms_norm").fn, cases_of("rms_norm")[0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        outcomes(fn, [case, case])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    asleep = torch.cuda.Event()
    asleep.record()
    with torch.cuda.stream(side):
        outcomes(fn, [case])
    side.synchronize()
    assert not asleep.query()
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
@pytest.mark.parametrize("name", ["rms_norm", "moe_permute", "ssd_scan", "blocked_fold", "digest_words"])
def test_each_device_has_kernels_of_its_own(monkeypatch, name: str) -> None:
    monkeypatch.setattr(direct_launch, "_KERNELS", {})
    fn = variant_of(name).fn
    cases = {device: cases_of(name, f"cuda:{device}") for device in range(2)}
    expected = outcomes(fn, cases[0])
    for device in (1, 0, 1, 0):
        with torch.cuda.device(device):
            assert differing(cases[0], expected, outcomes(fn, cases[device])) == []
    devices = {key[0] for known in direct_launch._KERNELS.values() for key in known.compiled}
    assert devices == {0, 1}


def microseconds(launch: Callable[[], None]) -> float:
    """Of the host, for a launch: the best of five times LAUNCHES."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        times.append(time.perf_counter() - start)
    return min(times) / LAUNCHES * 1e6


def test_a_direct_launch_takes_the_host_less(monkeypatch, capsys) -> None:
    module, x_TH, weight_H = sys.modules[variant_of("rms_norm").fn.__module__], torch.randn(4, 256), torch.randn(256)
    x_TH, weight_H = x_TH.cuda(), weight_H.cuda()
    asked: list[tuple] = []

    def by_triton_alone(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        asked.append((kernel, grid, args, constants))
        kernel[grid](*args, **constants)

    def op() -> None:
        module.rms_norm(x_TH, weight_H, 1e-5)

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_kernel", by_triton_alone)
        op()
        kernel, grid, args, constants = asked[0]
        op_ordinary = microseconds(op)
    run_kernel(kernel, grid, *args, **constants)
    ordinary = microseconds(lambda: kernel[grid](*args, **constants))
    direct = microseconds(lambda: run_kernel(kernel, grid, *args, **constants))
    with capsys.disabled():
        print(f"\nhost us a launch of rms_norm forward: by Triton {ordinary:.1f}, direct {direct:.1f}")
        print(f"host us a call of rms_norm forward: by Triton {op_ordinary:.1f}, direct {microseconds(op):.1f}")
    assert direct < ordinary
