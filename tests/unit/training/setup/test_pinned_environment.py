"""Variables that can change bits: bad values are refused by name, needed ones are set, the rest is recorded."""

from __future__ import annotations

import pytest

from megatron.core.config.numerics import NumericsConfig
from megatron.training.setup.pinned_environment import (
    PINS,
    environment_problems,
    late_problems,
    launch_environment,
    recorded_environment,
    values_to_set,
)

STRICT = NumericsConfig(deterministic_mode=True)
LOOSE = NumericsConfig()


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", "junk", ":16:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "large", "32768"),
        ("TORCH_BLAS_PREFER_CUBLASLT", "1", "0"),
        ("NCCL_ALGO", "Tree", "Ring"),
        ("NCCL_ALGO", "Ring,Tree", "ring,^NVLS"),
        ("NCCL_ALGO", "", "CollnetChain"),
        ("NCCL_NVLS_ENABLE", "1", "0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("MAMBA_DETERMINISTIC", "0", "1"),
        ("CAUSAL_CONV1D_DETERMINISTIC", "0", "1"),
        ("NVIDIA_TF32_OVERRIDE", "1", "0"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "0"),
        ("TRITON_CACHE_AUTOTUNING", "1", "0"),
    ],
)
def test_bad_value_is_refused_with_the_accepted_ones(name: str, bad: str, good: str):
    (problem,) = environment_problems({name: bad}, STRICT)
    pin = next(pin for pin in PINS if pin.name == name)
    assert f"{name}={bad} in the environment" in problem.given
    assert pin.accepted in problem.needed
    assert environment_problems({name: good}, STRICT) == []
    assert environment_problems({name: bad}, LOOSE) == []
    allowed = NumericsConfig(deterministic_mode=True, determinism_allow_env=f"OTHER, {name}")
    assert environment_problems({name: bad}, allowed) == []


def test_exceptions_have_to_name_variables():
    numerics = NumericsConfig(deterministic_mode=True, determinism_allow_env="NCCL_ALGO NCCL_PROTO, CUDA_X")
    (problem,) = environment_problems({}, numerics)
    assert problem.given == "--determinism-allow-env 'NCCL_ALGO NCCL_PROTO'"


def test_every_pin_has_a_bad_value_above():
    assert {pin.name for pin in PINS if not pin.holds("no such value")} == {pin.name for pin in PINS}


def test_needed_values_are_set_only_where_the_launcher_set_none():
    needed = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_NVLS_ENABLE": "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MAMBA_DETERMINISTIC": "1",
        "CAUSAL_CONV1D_DETERMINISTIC": "1",
    }
    assert values_to_set({}, STRICT) == needed
    assert values_to_set({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, STRICT).keys() == needed.keys() - {
        "CUBLAS_WORKSPACE_CONFIG"
    }
    assert values_to_set({}, LOOSE) == {}
    assert environment_problems(values_to_set({}, STRICT), STRICT) == []


def test_what_can_no_longer_act_is_said_by_name_and_only_that():
    needed = values_to_set({}, STRICT)
    problems = late_problems(needed, {"CUDA", "mamba_ssm", "json"})
    assert [problem.change.split()[-1] for problem in problems] == [
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "MAMBA_DETERMINISTIC=1",
    ]
    assert "mamba_ssm is in use already" in problems[1].given
    assert late_problems({}, {"CUDA", "mamba_ssm"}) == []
    assert late_problems(needed, {"torch"}) == []


def test_what_can_change_bits_is_recorded_and_what_travels_is_not():
    environment = {
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_ALGO": "Tree",
        "MY_SWITCH": "1",
        "NOT_ASKED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    numerics = NumericsConfig(deterministic_mode=True, determinism_allow_env="NCCL_ALGO,MY_SWITCH,NOT_SET")
    assert recorded_environment(environment, numerics) == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "MY_SWITCH": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    assert launch_environment(environment) == {"NCCL_ALGO": "Tree"}
