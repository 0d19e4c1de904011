"""Which implementations of an op exist, what each promises, and which one a run uses.

An op is a folder with a specification, a reference and further variants; its ``__init__`` joins them in an ``Op``. The
catalog lists all ops. A run's ``OpTable`` is built once, before the model; modules take callables from it when they
are constructed and never ask about modes again.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.numerics import FASTEST, FLOAT_SUMS, NATIVE, ORDERED, NumericsConfig
from megatron.core.ops.launch import TABLE
from megatron.core.ops.launch_table import rows_declared_in
from megatron.core.ops.outside import Outside, load_problems, start_problems
from megatron.core.ops.ranking import fastest_first


class Guarantee(enum.IntEnum):
    """What a variant promises about its bits; each level has one generic test and a claim without it is a failure."""

    NONE = 0
    """May differ between two runs (atomics, a choice made by timing)."""
    RUN_TO_RUN = 1
    """Same inputs on the same kind of device: same bits."""
    BATCH = 2
    """A row's bits do not depend on the other rows either."""
    LAYOUT = 3
    """Same bits for every cut over ranks too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set of arguments for the conformance tests.

    ``args`` are passed by position, ``kwargs`` by name. Floating-point tensors that ``grads`` names (position or
    keyword) get gradients, which are compared as well. ``writes`` names the arguments the op changes in place; their
    new values are compared after its results.
    """

    name: str
    args: tuple
    kwargs: Mapping[str, object] = field(default_factory=dict)
    grads: tuple[int | str, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One way to split a call into smaller calls whose results, put together, must have the same bits.

    Attributes:
        name: what is cut, e.g. ``rows``.
        level: the guarantee that makes this cut harmless, ``BATCH`` or ``LAYOUT``.
        args: dimension along which each argument (position or keyword) is cut, in the cases that have it; the others go
            whole into every piece.
        outs: dimension along which each result is put together, first to last, as many as a case has; ``None``: the
            pieces' results add up.
        unit: cut positions are multiples of it.
        adjust: ``adjust(args, start, stop)`` rewrites the list of positional arguments of a piece where they are not
            tensors (counts, boxes).
    """

    name: str
    level: Guarantee
    args: Mapping[int | str, int]
    outs: tuple[int | None, ...] = (0,)
    unit: int = 1
    adjust: Callable[[list, int, int], list] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest accepted distance from the reference in fp64 (of the same inputs), and why.

    An element may differ by ``rtol`` of itself plus ``atol`` times the largest magnitude in its tensor (at least 1).
    """

    rtol: float
    atol: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """An op's contract, shared by all its variants.

    Attributes:
        name: the op.
        promise: one sentence: what it computes.
        order: one sentence: in which order numbers are added.
        cases: ``cases(generator, dtype, device)`` gives argument sets, odd and empty sizes included.
        tolerance: by activation type.
        exact: every variant gives the reference's bits on the same device, because the order is part of the promise.
        cuts: the splits that variants which promise ``BATCH`` or ``LAYOUT`` are tested with.
    """

    name: str
    promise: str
    order: str
    cases: Callable[[torch.Generator, torch.dtype, torch.device], list[Case]]
    tolerance: Mapping[torch.dtype, Tolerance]
    exact: bool = False
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One implementation of an op.

    Attributes:
        name: guarantee first, technology second, e.g. ``deterministic_triton``; of an outside package: its name first.
        fn: the callable; all variants of an op take the same arguments.
        guarantee: by device type; a device that is not listed is not supported.
        dtypes: activation types it takes.
        why: one sentence: what fixes, or breaks, the order of additions.
        head_widths: the widths of attention heads it takes; ``None``: all, or it has none.
        sources: further modules whose text is part of the implementation (kernels).
        outside: the package of kernels it calls, if that is loaded for those who chose it only.
    """

    name: str
    fn: Callable[..., object]
    guarantee: Mapping[str, Guarantee]
    why: str
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16})
    sources: tuple[str, ...] = ()
    outside: Outside | None = None
    head_widths: range | None = None

    def takes(self, device: str, dtype: torch.dtype, head_width: int | None) -> bool:
        """Whether it runs on a kind of device with that type of activations and that width of attention heads."""
        fits = self.head_widths is None or head_width is None or head_width in self.head_widths
        return fits and device in self.guarantee and dtype in self.dtypes

    def source_hash(self) -> str:
        """SHA-256 over the implementing modules and their kernels' rows of the launch table, 16 hex digits."""
        total = hashlib.sha256()
        for module in (self.fn.__module__, *self.sources):
            text = Path(inspect.getfile(sys.modules[module])).read_text("utf-8")
            total.update((text + rows_declared_in(text, TABLE)).encode())
        return total.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An op and its variants in order of preference, the fastest first; the last one is the reference."""

    spec: OpSpec
    variants: tuple[Variant, ...]

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            KeyError: there is none.
        """
        return {v.name: v for v in self.variants}[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTable:
    """The ops of one run: ``table["rms_norm"]`` is a callable."""

    device: str
    dtype: torch.dtype
    chosen: Mapping[str, Variant] = field(repr=False)

    def __getitem__(self, op: str) -> Callable[..., Any]:
        return self.chosen[op].fn

    @property
    def promise(self) -> Guarantee:
        """The weakest guarantee among the chosen variants."""
        return min(v.guarantee[self.device] for v in self.chosen.values())

    def manifest(self) -> dict[str, dict[str, str]]:
        """Variant, guarantee and source hash of every op, and the outside package's version, for the run's manifest."""
        return {
            op: {
                "variant": v.name,
                "guarantee": v.guarantee[self.device].name,
                "source": v.source_hash(),
                **({"package": f"{v.outside.package} {v.outside.version}"} if v.outside else {}),
            }
            for op, v in sorted(self.chosen.items())
        }


def _overrides(text: str | None, ops: Mapping[str, Op]) -> tuple[dict[str, str], list[Problem]]:
    entries = [entry for entry in (text or "").split(",") if entry]
    wanted = dict.fromkeys(ops, FASTEST) if FASTEST in entries else {}
    problems = []
    for entry in entries:
        op, _, name = entry.partition("=")
        if entry == FASTEST or (op == FLOAT_SUMS and name in (ORDERED, NATIVE)):
            continue
        if op not in ops:
            known = ", ".join([*sorted(ops), FLOAT_SUMS])
            problems.append(Problem(f"--op-variants {entry}", f"an op among {known}", "--op-variants"))
        elif name not in (names := [*(v.name for v in ops[op].variants), FASTEST]):
            problems.append(Problem(f"--op-variants {entry}", f"a variant among {', '.join(names)}", "--op-variants"))
        else:
            wanted[op] = name
    return wanted, problems


def _wanted_text(op: Op, name: str) -> str:
    """The variant that was asked for, and its package where that is what is missing."""
    outside = op.variant(name).outside if name != FASTEST else None
    absent = outside is not None and not outside.installed
    return f"variant {name}" + (f", whose package {outside.package} is not installed" if absent else "")


def _outside_problems(chosen: Mapping[str, Variant], numerics: NumericsConfig) -> list[Problem]:
    """What keeps chosen outside variants from being what their names say; loads their packages if nothing does."""
    wanted = {f"{op}={v.name}": v.outside for op, v in chosen.items() if v.outside}
    strict = numerics.deterministic_mode
    problems = [
        problem
        for choice, outside in wanted.items()
        for problem in start_problems(choice, outside, strict=strict, allowed_environment=numerics.allowed_environment)
    ]
    return problems or [problem for choice, outside in wanted.items() for problem in load_problems(choice, outside)]


def build_table(
    ops: Iterable[Op],
    numerics: NumericsConfig,
    device: torch.device,
    dtype: torch.dtype,
    head_width: int | None = None,
) -> OpTable:
    """Choose one variant per op for a device, an activation type and, where the model has them, attention heads.

    In deterministic mode the first variant that promises at least ``RUN_TO_RUN`` is taken; otherwise the first that
    runs at all. ``--op-variants`` overrides single ops; ``fastest`` is the first by ``ranking.py``, whatever it
    promises. Outside packages of the chosen variants are imported here, and no others.

    Raises:
        ConfigError: an op has no variant that keeps the promise; an override is unknown or cannot run here; or an
            outside variant would not be what its name says (mode or version) or its package does not load.
    """
    by_name = {op.spec.name: op for op in ops}
    wanted, problems = _overrides(numerics.op_variants, by_name)
    need = Guarantee.RUN_TO_RUN if numerics.deterministic_mode else Guarantee.NONE
    model = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    chosen: dict[str, Variant] = {}
    for name, op in by_name.items():
        runs = [v for v in op.variants if v.takes(device.type, dtype, head_width)]
        unasked = [v for v in runs if v.outside is None or v.outside.fits(strict=numerics.deterministic_mode)]
        if wanted.get(name) == FASTEST:
            fit = [op.variant(first) for first in fastest_first(name, model, [v.name for v in unasked])]
        elif name in wanted:
            fit = [v for v in runs if v.name == wanted[name]]
        else:
            fit = [v for v in unasked if v.guarantee[device.type] >= need]
        if fit:
            chosen[name] = fit[0]
            continue
        have = ", ".join(f"{v.name} ({v.guarantee[device.type].name})" for v in runs) or "no variant"
        asked = name in wanted
        needed = _wanted_text(op, wanted[name]) if asked else f"a variant that promises {need.name}"
        without = ", or leave out --deterministic-mode" * (numerics.deterministic_mode and not asked)
        heads = f" with heads of width {head_width}" * (
            head_width is not None and any(v.head_widths for v in op.variants)
        )
        given = f"op {name} on {device.type} in {dtype}{heads}"
        problems.append(Problem(given, f"{needed}; there is {have}", f"--op-variants {name}=...{without}"))
    problems = problems or _outside_problems(chosen, numerics)
    if problems:
        raise ConfigError(problems)
    return OpTable(device=device.type, dtype=dtype, chosen=chosen)
