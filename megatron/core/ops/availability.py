"""Variants behind optional packages: registered where the package is installed, unknown where it is not."""

from __future__ import annotations

import importlib
import importlib.util

from megatron.core.ops.registry import Guarantee, Variant


def installed(package: str) -> bool:
    """Whether ``package`` (a top-level name) can be imported; it is not imported by asking."""
    return importlib.util.find_spec(package) is not None


def variants_needing(package: str, *modules: str) -> tuple[Variant, ...]:
    """``VARIANT`` of each of ``modules``, or nothing if ``package`` is not installed.

    A module that fails to load although the package is there raises: a broken installation is not a missing one.
    """
    if not installed(package):
        return ()
    return tuple(importlib.import_module(module).VARIANT for module in modules)


def on_cuda_with(package: str, level: Guarantee) -> dict[str, Guarantee]:
    """What a variant promises that calls ``package`` on a GPU: ``level`` where it is installed, and no support for any
    device where it is not."""
    return {"cuda": level} if installed(package) else {}
