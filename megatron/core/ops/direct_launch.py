"""Launches of Triton kernels without asking Triton each time which compiled kernel the arguments need.

Triton binds and specialises on every launch, which takes the host several times as long as the driver's launch. Here a
key stands for all that Triton would look at: the first launch with a key is Triton's, and what it compiled is kept;
later ones start that on the current stream. Keys hold kinds of arguments, not values, so that sizes which change from
step to step add none. Triton's settings, and the globals that a kernel uses, are taken to be what they were at first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KEYED = (int, bool, str, type(None), tl.dtype)
"""Types of constants of which values that are equal, and of one type, are the same to Triton."""


class _Kernel:
    """What is known of one kernel.

    Attributes:
        kernel: the kernel itself; being kept, nothing else gets its ``id``.
        runtime: names of the parameters that are no constants, which come first.
        constants: names of the others.
        declared: all of ``runtime`` have declared types, and nothing of their values is compiled in.
        compiled: by key: what Triton compiled, which it unloads with the last reference; what runs that; the constants
            in the order of parameters.
    """

    __slots__ = ("compiled", "constants", "declared", "kernel", "runtime")

    def __init__(self, kernel: Any) -> None:
        params = kernel.params
        count = sum(not param.is_constexpr for param in params)
        self.kernel = kernel
        self.runtime = tuple(param.name for param in params[:count])
        self.constants = tuple(param.name for param in params[count:])
        self.declared = all(param.do_not_specialize and param.annotation_type for param in params[:count])
        self.compiled: dict[Hashable, tuple[CompiledKernel, Callable[..., object], tuple[Any, ...]]] = {}
        if any(param.is_constexpr for param in params[:count]):
            raise TypeError(f"{kernel.__name__}: the constants of a kernel are its last parameters")


_KERNELS: dict[int, _Kernel] = {}
"""By ``id``: the hash of a Triton kernel is one of its text."""


def kinds_of(args: tuple[Any, ...]) -> tuple[tuple[Hashable, ...], list[Any]] | None:
    """All that Triton compiles in of run-time arguments, and the arguments with addresses in place of tensors.

    That is: a tensor's type, and whether its address is a multiple of 16; an integer's width, and whether it is 1 or a
    multiple of 16; that an argument is a float, a bool or ``None``; the type and block of a descriptor; and the same of
    a tuple's elements. ``None`` where an argument is anything else, such as a tensor that is not on a GPU.
    """
    kinds: list[Any] = []
    given: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            if -0x80000000 <= arg < 0x80000000:
                kinds.append("1" if arg == 1 else "i32" if arg & 15 else "i32:16")
            else:
                kinds.append((arg < 1 << 63, arg & 15 == 0))
            given.append(arg)
        elif isinstance(arg, Tensor):
            if not arg.is_cuda:
                return None
            address = arg.data_ptr()
            kinds.append((arg.dtype,) if address & 15 else arg.dtype)
            given.append(address)
        elif arg is None or kind is float or kind is bool:
            kinds.append(kind)
            given.append(arg)
        elif kind is tuple:
            inner = kinds_of(arg)
            if inner is None:
                return None
            kinds.append((tuple, inner[0]))
            given.append(tuple(inner[1]))
        elif kind is TensorDescriptor and arg.base.is_cuda:
            kinds.append((kind, arg.base.dtype, *arg.block_shape))
            given.append(arg)
        else:
            return None
    return tuple(kinds), given


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel: ``kernel[grid](*args, **constants)``.

    Triton itself does it where the kernel is interpreted, an argument is of a kind that has no key, and as long as
    there are hooks on launches or on the kernel.

    Args:
        kernel: what ``triton.jit`` made.
        grid: programs along one to three dims.
        args: all run-time arguments, in order; tensors where the current device reaches them.
        constants: the ``constexpr`` arguments and Triton's options.

    Raises:
        TypeError: a run-time argument is given by name, or a constant by position.
    """
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*args, **constants)
        return
    known = _KERNELS.get(id(kernel)) or _KERNELS.setdefault(id(kernel), _Kernel(kernel))
    found = ((), args) if known.declared else kinds_of(args)
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if found is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks:
        kernel[grid](*args, **constants)
        return
    device = driver.active.get_current_device()
    # 1 and True are equal: types tell them apart.
    key = (device, found[0], *constants.items(), *map(type, constants.values()))
    before = known.compiled.get(key)
    if before is None:
        _first(known, key, grid, args, constants)
        return
    compiled, run, values = before
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *found[1], *values)


def _first(
    known: _Kernel, key: Hashable, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch by Triton, and keep what it compiled if equal keys mean the same to Triton."""
    if len(args) != len(known.runtime) or not constants.keys().isdisjoint(known.runtime):
        raise TypeError(f"{known.kernel.__name__} takes {', '.join(known.runtime)} by position and the rest by name")
    compiled = known.kernel[grid](*args, **constants)
    keyed = all(isinstance(value, KEYED) for value in constants.values())
    if keyed and isinstance(compiled, CompiledKernel) and constants.keys() >= set(known.constants):
        values = tuple(constants[name] for name in known.constants)
        known.compiled[key] = (compiled, compiled.run, values)
