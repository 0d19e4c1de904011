"""Environment variables that can change bits: which are set, which values are refused, which are recorded.

Pure and free of torch: asked before torch is loaded, because some of these variables only act when a library starts.
Values a launcher sets on purpose are taken with ``--determinism-allow-env`` and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from megatron.core.config.errors import Problem
from megatron.core.config.numerics import NumericsConfig

_NCCL_ALGORITHMS = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One variable that deterministic mode constrains.

    ``accepted`` describes the values that ``holds`` takes; ``value`` is set where the variable is not, if given.
    ``read_by`` is what reads the variable, once: a module's name or ``CUDA_IN_USE``; empty where setting it late still
    acts.
    """

    name: str
    accepted: str
    holds: Callable[[str], bool]
    why: str
    value: str | None = None
    read_by: str = ""


def _nccl_algorithm_holds(text: str) -> bool:
    known = {name.lower() for name in _NCCL_ALGORITHMS}
    return all(word.strip().lower() in known for word in text.split(","))


def _starts_with_one(text: str) -> bool:
    return text.startswith("1")


def _is_zero(text: str) -> bool:
    return text == "0"


CUDA_IN_USE = "CUDA"
"""Stands for a CUDA context that exists."""

PINS = (
    Pin(
        name="CUBLAS_WORKSPACE_CONFIG",
        accepted=":4096:8 or :16:8",
        holds=lambda text: text in (":4096:8", ":16:8"),
        value=":4096:8",
        read_by=CUDA_IN_USE,
        why="a workspace of its own for each stream; without one, products on several streams may differ",
    ),
    Pin(
        name="CUBLASLT_WORKSPACE_SIZE",
        accepted="a whole number of KiB",
        holds=str.isdecimal,
        read_by=CUDA_IN_USE,
        why="the workspace decides which algorithms cuBLASLt may take; part of what comparable runs agree on",
    ),
    Pin(
        name="TORCH_BLAS_PREFER_CUBLASLT",
        accepted="0",
        holds=_is_zero,
        why="one BLAS library, not a choice per shape",
    ),
    Pin(
        name="NCCL_ALGO",
        accepted=", ".join(_NCCL_ALGORITHMS),
        holds=_nccl_algorithm_holds,
        why="Megatron's list; sums are ours or one addition, so an exception is safe and is how to prove that",
    ),
    Pin(
        name="NCCL_NVLS_ENABLE",
        accepted="0",
        holds=_is_zero,
        value="0",
        why="where two ranks leave their one addition to NCCL, a GPU makes it and no switch",
    ),
    Pin(
        name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        accepted="0",
        holds=_is_zero,
        value="0",
        read_by="transformer_engine",
        why="Transformer Engine takes attention kernels with atomic additions otherwise",
    ),
    Pin(
        name="MAMBA_DETERMINISTIC",
        accepted="1",
        holds=_starts_with_one,
        value="1",
        read_by="mamba_ssm",
        why="mamba-ssm cuts its lists of autotuning configurations when it is imported",
    ),
    Pin(
        name="CAUSAL_CONV1D_DETERMINISTIC",
        accepted="1",
        holds=_starts_with_one,
        value="1",
        read_by="causal_conv1d",
        why="causal-conv1d adds the weights' gradients by atomics otherwise",
    ),
    Pin(
        name="NVIDIA_TF32_OVERRIDE",
        accepted="0",
        holds=_is_zero,
        why="it switches TF32 on behind torch's back",
    ),
    Pin(
        name="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        accepted="0",
        holds=_is_zero,
        why="it switches TF32 on behind torch's back",
    ),
    Pin(
        name="TRITON_CACHE_AUTOTUNING",
        accepted="0",
        holds=_is_zero,
        why="a choice by timing that is kept outlives the run that made it",
    ),
)
"""Megatron's list, and the variables that switch TF32 on behind torch's back."""

RECORDED = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDNN_CONV_WSCAP_DBG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
"""Variables whose value may change bits; part of what two comparable runs agree on."""


def environment_problems(environment: Mapping[str, str], numerics: NumericsConfig) -> list[Problem]:
    """Values set by the launcher that deterministic mode cannot keep its promise with, and exceptions that name no
    variable; none without that mode."""
    if not numerics.deterministic_mode:
        return []
    allowed = numerics.allowed_environment
    unnamed = [
        Problem(
            f"--determinism-allow-env {name!r}", "names of variables with commas between", "--determinism-allow-env"
        )
        for name in allowed
        if not name.isidentifier()
    ]
    return unnamed + [
        Problem(
            f"{pin.name}={environment[pin.name]} in the environment with --deterministic-mode",
            f"{pin.accepted}, or the variable not set",
            f"{pin.name}, or --determinism-allow-env {pin.name} to run with it and record it",
            local=True,
        )
        for pin in PINS
        if pin.name in environment and pin.name not in allowed and not pin.holds(environment[pin.name])
    ]


def values_to_set(environment: Mapping[str, str], numerics: NumericsConfig) -> dict[str, str]:
    """Variables that deterministic mode needs and the launcher left unset; none without that mode."""
    if not numerics.deterministic_mode:
        return {}
    return {pin.name: pin.value for pin in PINS if pin.value is not None and pin.name not in environment}


def late_problems(to_set: Mapping[str, str], in_use: Collection[str]) -> list[Problem]:
    """Variables of ``to_set`` that can no longer act, because what reads them is in use: set now, they would look right
    and do nothing."""
    return [
        Problem(
            f"deterministic mode entered when {pin.read_by} is in use already, started without {pin.name}",
            f"{pin.name}={pin.value} before {pin.read_by} starts, which reads it once",
            f"enter deterministic mode before that, or start the process with {pin.name}={pin.value}",
        )
        for pin in PINS
        if pin.name in to_set and pin.read_by in in_use
    ]


def recorded_environment(environment: Mapping[str, str], numerics: NumericsConfig) -> dict[str, str]:
    """Variables that are set and can change our bits; exceptions that were allowed included, except NCCL's."""
    allowed = numerics.allowed_environment
    names = {*RECORDED, *(name for name in allowed if not name.startswith("NCCL_"))}
    return {name: environment[name] for name in sorted(names) if name in environment}


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables: they say how bytes travel, which no sum of ours depends on."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
