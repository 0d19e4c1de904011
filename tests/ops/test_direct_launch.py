"""Direct launches: what keys tell apart, what the compiled kernel is given, and who is left to Triton."""

from __future__ import annotations

import ast
import gc
import weakref
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.core.ops import direct_launch
from megatron.core.ops.digest_words.kernels.digest_words import digest_words_kernel
from megatron.core.ops.direct_launch import kinds_of, run_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
NUMBERS = (0, 1, 2, 15, 16, 17, 48, -1, -16, *(sign * 2**31 + d for sign in (-1, 1) for d in (-16, -1, 0, 1, 16)))
LARGE = (2**63 - 16, 2**63 - 1, -(2**63), 2**63, 2**63 + 1, 2**64 - 16, 2**64 - 1)


class OnGPU(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def on_gpu(dtype: torch.dtype = torch.float32, first: int = 0) -> OnGPU:
    return torch.zeros(64, dtype=dtype)[first:].as_subclass(OnGPU)


def described(dtype: torch.dtype, block: list[int]) -> TensorDescriptor:
    shape = (2, 64, 64)[-len(block) :]
    return TensorDescriptor.from_tensor(torch.zeros(shape, dtype=dtype).as_subclass(OnGPU), block)


def values() -> list[Any]:
    """Arguments of all kinds, several of each."""
    tensors = [on_gpu(dtype, first) for dtype in DTYPES for first in (0, 1, 16)]
    plain = [*NUMBERS, *LARGE, True, False, None, 0.0, -0.0, 1.0, 2.5, *tensors]
    tuples = [(), (tensors[0],), (tensors[1],), (tensors[0], tensors[3]), (tensors[0], None), (1, 16), (1, 2)]
    blocks = ([16, 16], [16, 32], [32, 16])
    descriptors = [described(dtype, block) for dtype in (torch.float32, torch.bfloat16) for block in blocks]
    return [*plain, *tuples, *descriptors, described(torch.float32, [1, 16, 16])]


def triton_says(value: Any) -> tuple:
    return native_specialize_impl(CUDABackend(GPUTarget("cuda", 90, 32)), value, False, True, True)


def mistaken(key: Any) -> list[tuple[Any, Any]]:
    """Pairs of arguments that Triton compiles for apart, and ``key`` takes for one."""
    told = [(value, triton_says(value), key(value)) for value in values()]
    return [(a[0], b[0]) for a, b in combinations(told, 2) if a[1] != b[1] and a[2] == b[2]]


def kind(value: Any) -> Any:
    found = kinds_of((value,))
    assert found is not None
    return found[0]


def test_keys_differ_wherever_triton_compiles_apart():
    assert mistaken(kind) == []


def test_keys_that_leave_out_alignment_are_caught():
    def without(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(without, value))
        return value.dtype if isinstance(value, torch.Tensor) else kind(value)

    pairs = mistaken(without)
    assert pairs
    assert all(isinstance(value, torch.Tensor | tuple) for pair in pairs for value in pair)


def test_numbers_of_one_kind_have_one_key():
    kinds = {kind(number) for number in range(1 << 12)}
    assert len(kinds) == len({triton_says(number) for number in range(1 << 12)}) == 3


def test_numbers_of_declared_types_are_not_compiled_in():
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    assert {native_specialize_impl(backend, number, False, False, True)[1:] for number in NUMBERS + LARGE} == {(None,)}


def test_what_has_no_key():
    assert kinds_of((torch.zeros(4),)) is None
    assert kinds_of((3, (torch.zeros(4),))) is None
    assert kinds_of((TensorDescriptor.from_tensor(torch.zeros(16, 16), [16, 16]),)) is None
    assert kinds_of((object(),)) is None
    assert kinds_of((torch.float32,)) is None


@triton.jit
def planted_kernel(x_ptr, bias_ptr, rows, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Never compiled."""


class Compiled(CompiledKernel):
    """Keeps what it is run with."""

    def __init__(self, runs: list[tuple]) -> None:
        self.runs, self.function, self.packed_metadata = runs, "function", "metadata"
        self.module, self.name, self.src = None, "planted", None

    def _init_handles(self) -> None:
        """There is nothing to load."""

    @property
    def run(self) -> Any:
        runs = self.runs
        return lambda *given: runs.append(given)


class Kernel:
    """Stands for a kernel of Triton's: ``ordinary`` has the launches that it was asked for, ``runs`` the direct."""

    __name__ = "planted"

    def __init__(self, like: Any = planted_kernel) -> None:
        self.params, self.pre_run_hooks = like.params, []
        self.ordinary: list[tuple] = []
        self.runs: list[tuple] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.ordinary.append((grid, args, constants))
            self.compiled.append(Compiled(self.runs))
            return self.compiled[-1]

        return launch

    def launches(self) -> tuple[int, int]:
        return len(self.ordinary), len(self.runs)


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Current device and stream, to be changed by the test."""
    now = SimpleNamespace(device=0, stream=7)
    now.active = SimpleNamespace(
        get_current_device=lambda: now.device, get_current_stream=lambda device: 100 * device + now.stream
    )
    monkeypatch.setattr(direct_launch, "driver", SimpleNamespace(active=now.active))
    monkeypatch.setattr(direct_launch, "_KERNELS", {})
    return now


def test_the_second_launch_is_direct_with_all_arguments_in_the_order_of_parameters(gpu):
    kernel, x, later = Kernel(), on_gpu(), on_gpu(first=16)
    constants = {"num_warps": 4, "BLOCK": 64, "KIND": True}
    run_kernel(kernel, (5,), x, None, 3, 1e-5, **constants)
    assert kernel.ordinary == [((5,), (x, None, 3, 1e-5), constants)]
    assert kernel.runs == []
    gpu.stream = 8
    run_kernel(kernel, (6, 2), later, None, 5, 2e-5, **constants)
    assert len(kernel.ordinary) == 1
    no_hooks = (None, None, None)
    given = (later.data_ptr(), None, 5, 2e-5, True, 64)
    assert kernel.runs == [(6, 2, 1, 8, "function", "metadata", *no_hooks, *given)]


def test_what_triton_compiled_is_run_as_triton_runs_it(gpu, monkeypatch):
    runs: list[tuple] = []

    def compiled(self: Any, key: Any, *rest: Any) -> Compiled:
        return self.device_caches[0][0].setdefault(key, Compiled(runs))

    gpu.active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu.active)
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    x = on_gpu(first=1)
    for _ in range(2):
        run_kernel(planted_kernel, (3, 2), x, None, 7, 0.5, num_warps=2, BLOCK=64, KIND=True)
    ordinary, direct = runs
    assert direct[6:9] == (None, None, None)
    addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in ordinary]
    assert [*addresses[:6], *addresses[9:]] == [*direct[:6], *direct[9:]]


def test_what_was_compiled_is_kept(gpu):
    kernel, x = Kernel(), on_gpu()
    run_kernel(kernel, (1,), x, None, 3, 0.5, KIND=1, BLOCK=64)
    compiled = weakref.ref(kernel.compiled.pop())
    gc.collect()
    assert compiled() is not None


@pytest.mark.parametrize(
    "change",
    [
        {"x": on_gpu(torch.bfloat16)},
        {"x": on_gpu(first=1)},
        {"bias": None},
        {"rows": 16},
        {"rows": 1},
        {"rows": 2**31},
        {"eps": 1},
        {"KIND": True},
        {"KIND": 2},
        {"BLOCK": 128},
        {"num_warps": 8},
        {"num_stages": 2},
        {"device": 1},
    ],
    ids=str,
)
def test_another_kind_of_argument_is_launched_by_triton_once(gpu, change: dict[str, Any]):
    kernel = Kernel()

    def launch(x=on_gpu(), bias=on_gpu(), rows=3, eps=0.5, device=0, **more: Any) -> None:  # noqa: B008
        gpu.device = device
        run_kernel(kernel, (1,), x, bias, rows, eps, **{"KIND": 1, "BLOCK": 64, **more})

    launch()
    launch()
    assert kernel.launches() == (1, 1)
    launch(**change)
    assert kernel.launches() == (2, 1)
    launch(**change)
    launch()
    assert kernel.launches() == (2, 3)


def test_sizes_that_change_from_step_to_step_add_no_keys(gpu):
    kernel, x = Kernel(), on_gpu()
    for rows in range(1000):
        run_kernel(kernel, (rows + 1,), x, x, rows, 0.1 * rows, KIND=1, BLOCK=64)
    assert kernel.launches() == (3, 997)


def test_a_kernel_with_declared_types_has_one_key_for_all_numbers(gpu):
    kernel = Kernel(digest_words_kernel)
    for base in (0, 1, 16, 2**40, 2**62):
        run_kernel(kernel, (4,), *(base + at for at in range(14)), ALIGNED=True, TAIL=False, TILE=64, GROUP=4)
    assert kernel.launches() == (1, 4)


def test_who_is_left_to_triton(gpu, monkeypatch):
    kernel, x = Kernel(), on_gpu()

    def launch(first: Any = x, **more: Any) -> tuple[int, int]:
        run_kernel(kernel, (1,), first, None, 3, 0.5, **{"KIND": 1, "BLOCK": 64, **more})
        return kernel.launches()

    launch()
    assert launch() == (1, 1)
    for ordinary, first in enumerate((torch.zeros(4), torch.zeros(4), object(), object()), start=2):
        assert launch(first) == (ordinary, 1)
    assert [launch(KIND=1.0), launch(KIND=1.0)] == [(6, 1), (7, 1)]
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, hook)
        chain.add(print)
        assert launch()[1] == 1
        chain.remove(print)
        monkeypatch.setattr(knobs.runtime, hook, print)
        assert launch()[1] == 1
        monkeypatch.setattr(knobs.runtime, hook, None)
    assert launch() == (11, 2)
    kernel.pre_run_hooks.append(print)
    assert launch() == (12, 2)


def test_interpreted_kernels_are_left_to_triton(monkeypatch):
    asked = []

    class Interpreted(InterpretedFunction):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: asked.append((grid, args, constants))

    kernel = Interpreted(planted_kernel.fn)
    for _ in range(2):
        run_kernel(kernel, (1,), 1, 2, 3, 4, KIND=1, BLOCK=64)
    assert asked == [((1,), (1, 2, 3, 4), {"KIND": 1, "BLOCK": 64})] * 2


def test_runtime_arguments_by_name_and_constants_by_position_are_refused(gpu):
    kernel, x = Kernel(), on_gpu()
    with pytest.raises(TypeError, match="planted takes x_ptr, bias_ptr, rows, eps by position"):
        run_kernel(kernel, (1,), x, None, 3, eps=0.5, KIND=1, BLOCK=64)
    with pytest.raises(TypeError, match="by position"):
        run_kernel(kernel, (1,), x, None, 3, 0.5, 1, BLOCK=64)
    assert kernel.ordinary == []


def launched_otherwise(code: str) -> list[str]:
    """Kernels that a file launches by a subscript."""
    calls = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)]
    return [name for name in names if name.endswith("_kernel")]


def test_all_kernels_are_launched_by_run_kernel():
    files = Path(direct_launch.__file__).parent.rglob("*.py")
    assert [name for path in files for name in launched_otherwise(path.read_text("utf-8"))] == []
    assert launched_otherwise("planted_kernel[(1,)](x)") == ["planted_kernel"]
