"""Variants that call an outside package of kernels: what has to hold before one is loaded, and loading it.

Such a package is imported by the run that chose one of its variants, when its table of ops is built, and by nobody
else. Some packages decide at that moment how they will add.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from megatron.core.config.errors import Problem
from megatron.core.ops.outside_versions import known_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """The package behind a variant.

    Attributes:
        package: top-level name of what is imported.
        load: imports it; called before the variant's first use, and harmless when repeated.
        at_least: first version the variant was shown with, where its promise or its call depends on that.
        switch: variable that turns the package's deterministic mode on, as torch's switch does where the variable is
            not set; empty: its mode does not matter here.
        deterministic: whether the variant is that mode, or the default one. Both have the same code; which of them it
            is depends on the process.
    """

    package: str
    load: Callable[[], object]
    at_least: str = ""
    switch: str = ""
    deterministic: bool = False

    @property
    def installed(self) -> bool:
        """Whether the package can be imported; it is not imported by asking."""
        return importlib.util.find_spec(self.package) is not None

    def fits(self, *, strict: bool) -> bool:
        """Whether the package is in the variant's mode in a run that is, or is not, in deterministic mode."""
        return not self.switch or self.deterministic == strict

    @property
    def version(self) -> str:
        """Of the installed package; ``unknown`` where it does not say."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.3.2.post1`` -> (2, 3, 2); () for one that is not known."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def start_problems(
    choice: str, outside: Outside, *, strict: bool, allowed_environment: Collection[str]
) -> list[Problem]:
    """Why a chosen variant (``op=variant``) would not be what its name says in this process; asked before it is loaded.

    ``strict``: the run is in deterministic mode. ``allowed_environment``: variables taken with values of the
    launcher's.
    """
    given, package, switch = f"--op-variants {choice}", outside.package, outside.switch
    problems = []
    if outside.at_least and numbers(outside.version) < numbers(outside.at_least):
        needed = f"{package} {outside.at_least} or later, the first it was shown with"
        problems.append(Problem(f"{given} with {package} {outside.version}", needed, f"the package, or {given}"))
    if not switch:
        return problems
    known = known_path(choice if not outside.deterministic else choice.removesuffix("_deterministic"))
    why = known.why if known else "its bits may differ between runs"
    if outside.deterministic and not strict:
        needed = f"{switch} pinned before {package} is imported, or {why}"
        problems.append(Problem(f"{given} without --deterministic-mode", needed, "--deterministic-mode, which pins it"))
    elif outside.deterministic and switch in allowed_environment:
        needed = f"{switch} pinned, or {why}"
        change = f"--determinism-allow-env without {switch}"
        problems.append(Problem(f"{given} with --determinism-allow-env {switch}", needed, change))
    elif outside.deterministic and not torch.are_deterministic_algorithms_enabled():
        needed = f"torch's deterministic algorithms on and {switch} set before {package} is imported, or {why}"
        change = "enter_deterministic_mode() of megatron.training.setup.determinism first"
        problems.append(Problem(f"{given} before deterministic mode was entered", needed, change))
    elif strict and not outside.deterministic:
        needed = f"a mode that this process does not switch off: {switch} and torch's switch do, because {why}"
        change = f"--op-variants {known.instead if known else 'without it'}, or --no-deterministic-mode"
        problems.append(Problem(f"{given} with --deterministic-mode", needed, change))
    return problems


def load_problems(choice: str, outside: Outside) -> list[Problem]:
    """Load the package; what went wrong, if it did."""
    try:
        outside.load()
    except (ImportError, OSError, AttributeError) as error:
        given = f"--op-variants {choice}, whose package {outside.package} {outside.version} does not load: {error}"
        return [Problem(given, f"a build of {outside.package} for this Python, torch and CUDA", "--op-variants")]
    return []
