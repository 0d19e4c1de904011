"""Deterministic mode inside a process that has torch: its switches, and the way in for programs of one's own.

The environment half, which has to act before libraries start, is ``pinned_environment.py``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.config.numerics import NumericsConfig
from megatron.core.ops.registry import Guarantee
from megatron.core.process_groups.float_sum_guard import refuse_float_sums
from megatron.training.setup.environment import export, read_environment
from megatron.training.setup.pinned_environment import (
    CUDA_IN_USE,
    environment_problems,
    late_problems,
    values_to_set,
)
from megatron.training.setup.pinned_switches import SWITCHES, Switch


def enter_deterministic_mode(allow_env: str | None = None) -> dict[str, str]:
    """What ``--deterministic-mode`` does to a process, for programs that do not use ``pretrain_hybrid.py``.

    Call it once, first thing: before a tensor is on a GPU and before transformer_engine, mamba_ssm or causal_conv1d is
    imported. It checks the environment, sets the variables that are missing and torch's switches, and makes process
    groups refuse floating-point sums. Models built afterwards take deterministic ops from
    ``build_table(ALL_OPS, NumericsConfig(deterministic_mode=True), ...)``.

    ``allow_env`` is a comma-separated list of variables whose values are taken as they are. Returns the variables it
    set.

    Raises:
        ConfigError: a variable has a value the promise cannot be kept with; or something that reads a missing one has
            started already, with what has to happen before it. Nothing was changed then.
    """
    numerics = NumericsConfig(deterministic_mode=True, determinism_allow_env=allow_env)
    environment = read_environment()
    to_set = values_to_set(environment, numerics)
    problems = [*environment_problems(environment, numerics), *late_problems(to_set, _in_use())]
    if problems:
        raise ConfigError(problems)
    export(to_set)
    pin_arithmetic(numerics)
    return to_set


def pin_arithmetic(numerics: NumericsConfig) -> None:
    """Set every switch of ``pinned_switches.SWITCHES``; nothing without deterministic mode.

    Sums over ranks of floating-point numbers are left to ``ordered_reduce``: a backend that is asked for one raises,
    except where --op-variants asks for the backend's sums.
    """
    if not numerics.deterministic_mode:
        return
    for switch in SWITCHES:
        if torch.cuda.is_available() or not switch.cuda:
            _write(switch)
    if not numerics.native_sums:
        refuse_float_sums()


def switches() -> dict[str, object]:
    """The switches as they stand, for the run's manifest."""
    return {switch.name: _read(switch) for switch in SWITCHES if torch.cuda.is_available() or not switch.cuda}


def kept_promise(numerics: NumericsConfig, weakest: Guarantee) -> str:
    """Name of what a run promises: the weakest guarantee among its ops, nothing where torch's switches are not set or
    the backend adds over ranks."""
    kept = numerics.deterministic_mode and not numerics.native_sums
    return (weakest if kept else Guarantee.NONE).name


def _in_use() -> frozenset[str]:
    """What has been loaded or started that reads variables once: names of modules, and CUDA."""
    return frozenset(sys.modules) | ({CUDA_IN_USE} if torch.cuda.is_initialized() else frozenset())


def _under_torch(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), torch)


def _read(switch: Switch) -> object:
    found = _under_torch(switch.read)
    value = found() if callable(found) else found
    return value if isinstance(value, bool | int | str) else str(value)


def _write(switch: Switch) -> None:
    if switch.write:
        _under_torch(switch.write)(switch.value)
    else:
        owner, _, name = switch.read.rpartition(".")
        setattr(_under_torch(owner), name, switch.value)
