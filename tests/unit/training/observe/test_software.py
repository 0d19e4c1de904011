"""Versions and device model: there, of text, and the same when asked again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.training.observe.software import cudnn_version, device_model, driver_version, source_digest, versions


def test_versions_are_texts_and_stable():
    found = versions()
    assert {"python", "numpy", "torch", "torch_build", "triton", "cuda", "cudnn", "nccl"} == set(found)
    assert found["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in found.values())
    assert versions() == found


def test_a_cudnn_that_is_not_torchs_is_named_by_itself(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cudnnGetVersion=lambda: 91400))
    assert cudnn_version() == "91400"


def test_cpu_is_its_instruction_set():
    model = device_model(torch.device("cpu"))
    assert model["type"] == "cpu"
    assert model["instruction_set"] == torch.backends.cpu.get_cpu_capability()


def test_driver_version_from_the_kernel_modules_file(tmp_path: Path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"
    )
    assert driver_version(path) == "580.95.05"


def test_source_digest_is_stable():
    assert source_digest() == source_digest()
    assert len(source_digest()) == 16
