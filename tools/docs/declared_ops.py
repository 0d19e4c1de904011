"""The registered ops as they are declared, on any machine.

Variants whose kernel package is missing are not registered, so a catalog made from what is registered would depend on
the machine. Here a missing package is stood in for by an empty one, for the length of the import: the files that
declare variants load, nothing of theirs can run, and the interpreter is not used for anything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch  # noqa: F401  loaded before the stand-ins, which it would take for the real packages

KERNEL_PACKAGES = (
    "apex",
    "causal_conv1d",
    "cudnn",
    "flash_attn",
    "fused_weight_gradient_mlp_cuda",
    "mamba_ssm",
    "transformer_engine",
    "triton",
)


class _Name:
    """Any name of a missing package. As a decorator it returns the function it is put on."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIns(MetaPathFinder, Loader):
    """Finds every module of the missing packages, each made of nothing but names."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def any_name(name: str) -> _Name:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Name()

        vars(module)["__getattr__"] = any_name


def declared_ops() -> tuple[Any, ...]:
    """``ALL_OPS`` of the catalog with every variant, those of packages that are missing here included."""
    missing = [package for package in KERNEL_PACKAGES if importlib.util.find_spec(package) is None]
    sys.meta_path.append(_StandIns(missing))
    return importlib.import_module("megatron.core.ops.catalog").ALL_OPS
