"""``manifest.json`` of a fingerprint folder: what comparable runs agree on, and the launches with what may differ.

The *trajectory* part holds everything the bits of a run are a function of: recipe, seed, data, logical layout, software
versions, device model, ops, environment. A *launch* says where and how it ran. Torch is not needed here; what torch
knows comes from ``software.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.folder import naming
from megatron.core.process_groups.topology import LogicalLayout, Topology
from megatron.training.config.manifest import MANIFEST_FILE, Json, as_json, read_manifest, recipe_part
from megatron.training.config.run import RunConfig
from megatron.training.observe.fingerprint import RANK_FILES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a trajectory depends on besides its settings.

    Attributes:
        data_digest: of the data the run reads, by content.
        versions: of the software, see ``software.versions``.
        device: see ``software.device_model``.
        ops: ``OpTable.manifest()``: variant, guarantee and source hash of each op.
        environment: variables that can change bits, see ``setup/pinned_environment.py``.
    """

    data_digest: str
    versions: Mapping[str, str]
    device: Mapping[str, str | int]
    ops: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, str]


def trajectory_part(config: RunConfig, layout: LogicalLayout, circumstances: Circumstances) -> Json:
    """What two runs must agree on to be compared. ``config`` is resolved, its vocabulary too."""
    return as_json(
        {
            **recipe_part(config),
            "data_digest": circumstances.data_digest,
            "logical_layout": dataclasses.asdict(layout),
            "versions": circumstances.versions,
            "device": circumstances.device,
            "ops": circumstances.ops,
            "environment": circumstances.environment,
        }
    )


def launch_part(
    config: RunConfig, topology: Topology, *, start_iteration: int, hosts: Sequence[str], backend: str, **further: Any
) -> Json:
    """One launch: physical layout, ranks, hosts, and every setting that changes no bit.

    ``further`` holds what else is worth knowing: machines (GPUs, their links, driver, container), promise, NCCL's
    variables, torch's switches, source digest.
    """
    return as_json(
        {
            "start_iteration": start_iteration,
            "world_size": topology.world,
            "physical_layout": {**dataclasses.asdict(topology), "edp": topology.edp},
            "hybrid_layer_pattern": config.model.hybrid_layer_pattern,
            "hosts": hosts,
            "distributed_backend": backend,
            "layout": config.with_effect("layout"),
            "operational": config.with_effect("operational"),
            **further,
        }
    )


def prepare_folder(folder: Path, trajectory: Json, launch: Json) -> None:
    """Write the manifest with this launch added; on the first rank only, before any rank opens its files.

    Where the physical layout is not that of the launch before, the ranks' own files describe other pieces of the state:
    they move to ``launch_N/``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launches = read_manifest(folder)["launches"] if (folder / MANIFEST_FILE).exists() else []
    if launches and launches[-1].get("physical_layout") != launch["physical_layout"]:
        kept = folder / f"launch_{len(launches) - 1}"
        kept.mkdir(exist_ok=True)
        for path in sorted(folder.glob(RANK_FILES)):
            path.rename(kept / path.name)
    write_json(folder / MANIFEST_FILE, {"trajectory": trajectory, "launches": [*launches, launch]})


def write_json(path: Path, value: Json) -> None:
    """As ``write_whole``, an object."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or not there: to a temporary name, synced, then renamed."""
    unfinished = path.with_name(path.name + ".part")
    with naming(path), unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
