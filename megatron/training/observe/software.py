"""What the bits of a run depend on besides its settings: software versions and the model of the device."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import numpy
import torch

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CUDNN = "libcudnn.so.9"
_PACKAGE = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Versions of everything that computes; ``none`` for what is not installed.

    ``torch_build`` is a digest of torch's build description: BLAS, compilers and their flags.
    """
    cuda = torch.version.cuda
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "triton": _installed("triton", "pytorch-triton"),
        "cuda": cuda or "none",
        "cudnn": cudnn_version() if cuda else "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
    }


def cudnn_version() -> str:
    """Version of the cuDNN library in this process, which is not torch's own where an outside package (Transformer
    Engine) has loaded another one first; torch refuses to name that one."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError:
        return str(ctypes.CDLL(_CUDNN).cudnnGetVersion())


def _installed(*distributions: str) -> str:
    """Version of the first of these distributions that is there."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def device_model(device: torch.device) -> dict[str, str | int]:
    """The part of the machine that bits depend on: a GPU's name, multiprocessors and driver, or a CPU's instruction
    set as torch uses it."""
    if device.type != "cuda":
        return {
            "type": "cpu",
            "architecture": platform.machine(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(_DRIVER_FILE),
    }


def driver_version(path: Path) -> str:
    """Version of the NVIDIA driver, from the kernel module's file, else from nvidia-smi; ``unknown`` without both."""
    if path.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text("utf-8"))
        if found:
            return found.group(1)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def source_digest() -> str:
    """Digest of this package's Python files, 16 hex digits: tells two states of the code apart, not two results."""
    total = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        total.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]
