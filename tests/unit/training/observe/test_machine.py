"""Facts about the machine: all of them where the driver tells, null where it does not, never a failure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.observe.machine import container, gpu_facts, load_nvml, machine_part

IDS = {"a": "0" * 63 + "a", "b": "0" * 63 + "b"}


class RefusedError(Exception):
    """What the driver raises for what it does not know."""


class Driver:
    """Stands for pynvml: three GPUs, the first two linked by 18 and 12 active NVLinks, the third by PCIe."""

    NVMLError = RefusedError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_NVLINK_MAX_LINKS = 2, 0, 18
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.silent, self.open = silent, 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "silent"):

            def refused(*args: object) -> None:
                raise RefusedError(name)

            return refused
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.devices[index]

    devices = tuple(SimpleNamespace(index=i) for i in range(3))

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13000

    def nvmlDeviceGetName(self, device: Any) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, device: Any) -> str:  # noqa: N802
        return f"GPU-{device.index}"

    def nvmlDeviceGetVbiosVersion(self, device: Any) -> str:  # noqa: N802
        return "96.0"

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:  # noqa: N802
        return SimpleNamespace(total=141 << 30)

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000:0{device.index}:00.0".encode())

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, what: int) -> int:  # noqa: N802
        return 0 if {a.index, b.index} == {0, 1} and what == self.NVML_P2P_CAPS_INDEX_NVLINK else 5

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:  # noqa: N802
        if device.index == 1 and link >= 12:
            raise RefusedError("no such link")
        return 1

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any) -> int:  # noqa: N802
        return 40 if 0 in (a.index, b.index) else 50


def test_gpus_and_how_they_are_linked() -> None:
    driver = Driver()
    facts = gpu_facts(driver)
    assert driver.open == 0
    assert facts["topology"] == [["X", "NV12", "NODE"], ["NV12", "X", "SYS"], ["NODE", "SYS", "X"]]
    assert (facts["driver"], facts["cuda_driver"]) == ("580.1", 13000)
    assert facts["gpus"][2] == {
        "name": "NVIDIA H200",
        "uuid": "GPU-2",
        "bus": "0000:02:00.0",
        "memory_bytes": 141 << 30,
        "vbios": "96.0",
    }


QUESTIONS = [name for name in vars(Driver) if name.startswith("nvml") and name not in ("nvmlInit", "nvmlShutdown")]


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name != "nvmlDeviceGetHandleByIndex"])
def test_what_a_driver_does_not_know_is_null(question: str) -> None:
    whole, facts = gpu_facts(Driver()), gpu_facts(Driver((question,)))
    assert facts != whole
    assert facts.keys() == whole.keys()


def test_a_driver_that_cannot_be_reached_leaves_everything_null() -> None:
    assert set(gpu_facts(Driver(("nvmlInit",))).values()) == {None}


def test_a_machine_without_the_package_or_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() is None
    facts = machine_part("here", {}, None, tmp_path)
    assert facts.pop("host") == "here"
    assert list(facts) == ["driver", "cuda_driver", "gpus", "topology", "container"]
    assert set(facts.values()) == {None}


def _system(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / {"cgroup": "proc/self/cgroup", "mountinfo": "proc/self/mountinfo"}.get(name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "environment", "found"),
    [
        ({"cgroup": f"0::/docker/{IDS['a']}\n"}, {}, {"kind": "docker", "id": IDS["a"], "image": None}),
        (
            {"cgroup": "0::/\n", "mountinfo": f"1 / /x/{IDS['b']}\n2 /var/lib/docker/containers/{IDS['a']}/hosts\n"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            {"kind": "kubernetes", "id": IDS["a"], "image": None},
        ),
        ({".dockerenv": ""}, {}, {"kind": "docker", "id": None, "image": None}),
        (
            {"run/.containerenv": 'engine="podman"\nid="77"\nimage="quay.io/x:1"\n'},
            {},
            {"kind": "podman", "id": "77", "image": "quay.io/x:1"},
        ),
        ({}, {"APPTAINER_CONTAINER": "/a.sif"}, {"kind": "apptainer", "id": None, "image": "/a.sif"}),
        ({}, {"ENROOT_ROOTFS": "/run/x"}, {"kind": "enroot", "id": None, "image": "/run/x"}),
        ({"cgroup": "0::/user.slice/session-1.scope\n", "mountinfo": f"1 / /x/{IDS['b']}\n"}, {}, None),
    ],
)
def test_the_container_where_something_tells(
    tmp_path: Path, files: dict[str, str], environment: dict[str, str], found: dict | None
) -> None:
    assert container(environment, _system(tmp_path, **files)) == found
