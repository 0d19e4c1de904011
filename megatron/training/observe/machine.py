"""Where a launch ran: GPUs, how they are linked, driver, container. Facts for the manifest; no result depends on them.

What bits do depend on, a GPU's model and its driver included, is ``software.device_model``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Json = dict[str, Any]

NVML = "pynvml"
MISSING_NVML = (
    "notice: nvidia-ml-py is not installed, so the manifest does not say which GPUs this ran on and how they are "
    "linked: pip install nvidia-ml-py, or the extra 'gpu'"
)
_CONTAINER_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
# By launcher: the variable with the image, and what is known as its container.
_IMAGES = {
    "APPTAINER_CONTAINER": "apptainer",
    "SINGULARITY_CONTAINER": "singularity",
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image": "pyxis",
    "ENROOT_ROOTFS": "enroot",
    "SLURM_CONTAINER": "slurm",
}


def machine_part(host: str, environment: Mapping[str, str], nvml: ModuleType | None, root: Path = Path("/")) -> Json:
    """Facts of this machine; ``None`` for what cannot be known, such as GPUs without ``nvml`` (see ``load_nvml``).

    ``root`` is where files of the system are looked for.
    """
    gpus: Json = {"driver": None, "cuda_driver": None, "gpus": None, "topology": None}
    return {"host": host, **(gpus if nvml is None else gpu_facts(nvml)), "container": container(environment, root)}


def load_nvml() -> ModuleType | None:
    """NVIDIA's management library, ``None`` where its package is not installed."""
    if importlib.util.find_spec(NVML) is None:
        return None
    import pynvml

    return pynvml


def gpu_facts(nvml: ModuleType) -> Json:
    """Driver, GPUs and the matrix of their links, as the driver counts them, visible to this process or not.

    ``topology[i][j]`` is ``NV<n>`` for n NVLinks, else how the PCIe paths meet: ``PIX`` one switch, ``PXB`` several,
    ``PHB`` a host bridge, ``NODE`` a NUMA node, ``SYS`` between nodes; ``X`` for i itself, ``None`` where the driver is
    silent.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {"driver": None, "cuda_driver": None, "gpus": None, "topology": None}
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(_asked(nvml, nvml.nvmlDeviceGetCount) or 0)]
        return {
            "driver": _text(_asked(nvml, nvml.nvmlSystemGetDriverVersion)),
            "cuda_driver": _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion),
            "gpus": [_gpu(nvml, device) for device in devices],
            "topology": [[_link(nvml, a, b) for b in devices] for a in devices],
        }
    finally:
        nvml.nvmlShutdown()


def _asked(nvml: ModuleType, question: Callable[..., Any], *args: Any) -> Any:
    """The answer, ``None`` where this driver or device has none."""
    try:
        return question(*args)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: ModuleType, device: Any) -> Json:
    memory, pci = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, device), _asked(nvml, nvml.nvmlDeviceGetPciInfo, device)
    return {
        "name": _text(_asked(nvml, nvml.nvmlDeviceGetName, device)),
        "uuid": _text(_asked(nvml, nvml.nvmlDeviceGetUUID, device)),
        "bus": None if pci is None else _text(pci.busId),
        "memory_bytes": None if memory is None else int(memory.total),
        "vbios": _text(_asked(nvml, nvml.nvmlDeviceGetVbiosVersion, device)),
    }


def _link(nvml: ModuleType, a: Any, b: Any) -> str | None:
    if a is b:
        return "X"
    if _asked(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        return f"NV{min(_active_links(nvml, a), _active_links(nvml, b))}"
    names = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    return names.get(_asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b))


def _active_links(nvml: ModuleType, device: Any) -> int:
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    return sum(_asked(nvml, nvml.nvmlDeviceGetNvLinkState, device, link) == 1 for link in links)


def container(environment: Mapping[str, str], root: Path = Path("/")) -> Json | None:
    """``kind``, ``id`` and ``image`` of the container this process is in, as far as they are known; ``None`` without a
    sign of one."""
    image, kind = next(
        ((environment[name], kind) for name, kind in _IMAGES.items() if environment.get(name)), (None, None)
    )
    podman = _read(root / "run/.containerenv")
    if podman is not None:
        named = dict(re.findall(r'^(\w+)="([^"]*)"$', podman, re.MULTILINE))
        return {"kind": "podman", "id": named.get("id"), "image": image or named.get("image")}
    found = None
    for path in ("proc/self/cgroup", "proc/self/mountinfo"):
        lines = (_read(root / path) or "").splitlines()
        # Of the mounts only a container's own files count: others may carry such digits for other reasons.
        mine = [line for line in lines if path.endswith("cgroup") or "containers/" in line]
        found = found or next((match.group() for line in mine if (match := _CONTAINER_ID.search(line))), None)
    if kind is None and ((root / ".dockerenv").exists() or found is not None):
        kind = "kubernetes" if "KUBERNETES_SERVICE_HOST" in environment else "docker"
    return None if kind is None else {"kind": kind, "id": found, "image": image}


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return None
