"""Megatron's questions about ranks and groups, for users' code; answers from one ``ProcessGroups``.

This package's own code is passed its process groups and never asks here. A run that ``pretrain_hybrid.py`` starts sets
them; a program that makes groups of its own calls ``set_process_groups`` once.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups.groups import Group, ProcessGroups


@dataclass(slots=True)
class _Held:
    groups: ProcessGroups | None = None


_held = _Held()


def set_process_groups(groups: ProcessGroups | None) -> None:
    """Make ``groups`` the ones asked about; ``None`` forgets them."""
    _held.groups = groups


def process_groups() -> ProcessGroups:
    """The groups asked about.

    Raises:
        RuntimeError: none are set yet.
    """
    if _held.groups is None:
        raise RuntimeError(
            "parallel groups are not initialised: start the run through pretrain_hybrid.py, or hand the groups that "
            "megatron.core.process_groups.groups.create_process_groups makes to parallel_state.set_process_groups"
        )
    return _held.groups


def model_parallel_is_initialized() -> bool:
    """Whether groups are set."""
    return _held.groups is not None


def destroy_model_parallel() -> None:
    """Forget the groups."""
    set_process_groups(None)


def get_tensor_model_parallel_group() -> Group:
    """Ranks that share one layer's weights."""
    return process_groups().tp


def get_tensor_model_parallel_world_size() -> int:
    """Number of tensor-parallel ranks."""
    return process_groups().tp.size


def get_tensor_model_parallel_rank() -> int:
    """This rank's position among the tensor-parallel ranks."""
    return process_groups().tp.rank


def get_pipeline_model_parallel_group() -> Group:
    """One rank of every pipeline stage."""
    return process_groups().pp


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return process_groups().pp.size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return process_groups().pp.rank


def is_pipeline_first_stage() -> bool:
    """Whether this rank is on the first pipeline stage."""
    return process_groups().pp.is_first


def is_pipeline_last_stage() -> bool:
    """Whether this rank is on the last pipeline stage."""
    return process_groups().pp.is_last


def get_data_parallel_group() -> Group:
    """Ranks that hold the same dense weights."""
    return process_groups().dp


def get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    return process_groups().dp.size


def get_data_parallel_rank() -> int:
    """This rank's position among the data-parallel ranks."""
    return process_groups().dp.rank


def get_expert_model_parallel_group() -> Group:
    """Ranks that share the experts of a layer."""
    return process_groups().ep


def get_expert_model_parallel_world_size() -> int:
    """Number of expert-parallel ranks."""
    return process_groups().ep.size


def get_expert_model_parallel_rank() -> int:
    """This rank's position among the expert-parallel ranks."""
    return process_groups().ep.rank


def get_expert_tensor_parallel_group() -> Group:
    """Ranks that share one expert's weights."""
    return process_groups().etp


def get_expert_tensor_parallel_world_size() -> int:
    """Number of expert-tensor-parallel ranks."""
    return process_groups().etp.size


def get_expert_tensor_parallel_rank() -> int:
    """This rank's position among the expert-tensor-parallel ranks."""
    return process_groups().etp.rank


def get_expert_data_parallel_group() -> Group:
    """Ranks that hold the same expert weights."""
    return process_groups().edp


def get_expert_data_parallel_world_size() -> int:
    """Number of expert-data-parallel ranks."""
    return process_groups().edp.size


def get_expert_data_parallel_rank() -> int:
    """This rank's position among the expert-data-parallel ranks."""
    return process_groups().edp.rank
