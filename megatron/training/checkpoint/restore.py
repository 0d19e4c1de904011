"""Load: from a checkpoint folder to the state of a run, proven tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.contracts.stage import Stage
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup, name_ranks
from megatron.core.dist_checkpointing.facts import Facts
from megatron.core.dist_checkpointing.load import load_pieces, require_same_tensors
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.optimizer_param_scheduler import Schedule
from megatron.core.process_groups.groups import ProcessGroups
from megatron.training.checkpoint.content import (
    GENERATORS,
    MASTERS,
    MOMENTS,
    ROUTERS,
    generator_key,
    generator_pieces,
    parameter_pieces,
    router_pieces_to_load,
    share_router_counts,
    zero_router_counts,
)
from megatron.training.checkpoint.position import Position
from megatron.training.config.resolve import known_batch_sizes, known_logical_layout
from megatron.training.config.resume_rules import Source, different_layout, different_schedule, takes_optimizer
from megatron.training.config.run import RunConfig
from megatron.training.setup.seeds import generator_states, restore_generators


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run starts.

    Attributes:
        position: steps and samples behind it.
        schedule: the checkpoint's schedule where it rules, else ``None``.
        schedule_start: samples consumed before the schedule's first step.
        generators: this rank's generator states, to be restored right before the first forward pass, or ``None``.
        stored_trajectory: what the checkpoint's run was a function of; ``None`` for a start from the seed.
        branches: where this run's trajectory left those it came from.
        words: what to tell the user.
    """

    position: Position = Position()
    schedule: Schedule | None = None
    schedule_start: int = 0
    generators: dict[str, torch.Tensor] | None = None
    stored_trajectory: dict[str, Any] | None = None
    branches: tuple[dict[str, Any], ...] = ()
    words: tuple[str, ...] = ()


def restore(
    source: Source,
    config: RunConfig,
    *,
    optimizer: Optimizer,
    chunks: Sequence[Stage],
    groups: ProcessGroups,
    group: CheckpointGroup,
) -> Start:
    """Fill masters, moments, step count and routers, derive the working weights, and prove all of it. Collective.

    Generators are read but not restored: see ``Start``.

    Raises:
        DamagedInputError: on all ranks: a file is damaged, or the checkpoint is of another model.
    """
    folder, facts = source.folder, source.facts
    with_optimizer = takes_optimizer(config.checkpoint, source)
    kinds = (MASTERS, *(MOMENTS if with_optimizer else ()))
    wanted = [*parameter_pieces(optimizer, kinds), *router_pieces_to_load(chunks, groups)]
    require_same_tensors(folder, facts, wanted, group, (*kinds, *ROUTERS))
    generators, generator_words = _generators(source, config, groups)
    load_pieces(folder, facts, [*wanted, *generator_pieces(generators or {}, group.rank)], group)
    share_router_counts(chunks, groups)
    if source.weights_only:
        zero_router_counts(chunks)
    if with_optimizer:
        optimizer.step_count = facts["step_count"]
    optimizer.complete_state()
    _prove_working_weights(optimizer, group)
    return Start(
        position=_position(source, config),
        schedule=_schedule(facts, config, with_optimizer),
        schedule_start=_schedule_start(source, config, with_optimizer),
        generators=generators,
        stored_trajectory=None if source.weights_only else facts["trajectory"],
        branches=_branches(source, config),
        words=(_loaded(source), *generator_words),
    )


def require_agreement(source: Source | None, group: CheckpointGroup) -> None:
    """All ranks found the same checkpoint, or none: they may not see the same disk. Collective.

    Raises:
        DamagedInputError: on all ranks: they did not; names what each has found.
    """
    mine = "no checkpoint" if source is None else f"{source.folder} with digest {source.facts['digest']}"
    found = group.gather(mine)
    if len(set(found)) > 1:
        raise DamagedInputError(f"ranks do not see the same checkpoints: {'; '.join(name_ranks(found))}")


def _prove_working_weights(optimizer: Optimizer, group: CheckpointGroup) -> None:
    wrong = optimizer.weights_unlike_masters()
    failures = group.failures(", ".join(wrong[:3]) or None)
    if failures:
        raise DamagedInputError(f"working weights are not the loaded masters, rounded: {'; '.join(failures)}")


def _position(source: Source, config: RunConfig) -> Position:
    if source.weights_only:
        return Position()
    facts, override = source.facts, config.checkpoint.override_ckpt_iteration
    iteration, consumed = facts["iteration"], facts["consumed_train_samples"]
    if override is not None:
        iteration, consumed = override, known_batch_sizes(config).after(0, override)
    return Position(
        iteration=iteration, consumed_train_samples=consumed, consumed_valid_samples=facts["consumed_valid_samples"]
    )


def _schedule(facts: Facts, config: RunConfig, with_optimizer: bool) -> Schedule | None:
    if not with_optimizer or not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return None
    return Schedule(**facts["schedule"])


def _schedule_start(source: Source, config: RunConfig, with_optimizer: bool) -> int:
    consumed = _position(source, config).consumed_train_samples
    return consumed - (source.facts["schedule_position"] if with_optimizer else 0)


def _loaded(source: Source) -> str:
    facts = source.facts
    what = "loaded weights of" if source.weights_only else "successfully loaded"
    return f"{what} checkpoint from {source.folder} at iteration {facts['iteration']}"


def _branches(source: Source, config: RunConfig) -> tuple[dict[str, Any], ...]:
    """The checkpoint's branches, and a new one where this launch starts another trajectory from its state. A flag that
    allows what does not happen starts none, so that it may stand in the command of a run that is launched again."""
    settings, facts = config.checkpoint, source.facts
    goes_on, layout = not source.weights_only, known_logical_layout(config)
    given = {
        "--finetune": source.weights_only,
        "--no-load-optim": goes_on and not settings.load_optim,
        "--override-ckpt-iteration": settings.override_ckpt_iteration is not None,
        "--override-opt-param-scheduler": goes_on
        and settings.override_opt_param_scheduler
        and different_schedule(config, source),
        "--new-logical-layout": goes_on and settings.new_logical_layout and different_layout(layout, source),
    }
    why = [flag for flag, branches_off in given.items() if branches_off]
    if not why:
        return tuple(facts["branches"])
    came_from = facts["logical_layout"] if goes_on else {}
    branch = {"iteration": facts["iteration"], "why": why, "state": facts["digest"], "logical_layout": came_from}
    return (*facts["branches"], branch)


def _generators(
    source: Source, config: RunConfig, groups: ProcessGroups
) -> tuple[dict[str, torch.Tensor] | None, tuple[str, ...]]:
    """Places for this rank's generator states, or why all ranks leave theirs as the seed sets them."""
    facts = source.facts
    if source.weights_only:
        return None, ()
    if not config.checkpoint.load_rng:
        return None, ("random generators are as the seed sets them (--no-load-rng)",)
    why = None
    if not facts["has_generators"]:
        why = "the checkpoint has none (--no-save-rng)"
    elif facts["physical_layout"] != asdict(groups.topology):
        there = ", ".join(f"{name} {size}" for name, size in facts["physical_layout"].items())
        why = f"the checkpoint's ranks were laid out in another way ({there})"
    mine = generator_states()
    stored = {key.rsplit(".", 1)[1] for key in facts["tensors"] if key.startswith(f"{GENERATORS}.rank_00000.")}
    if why is None and stored != mine.keys():
        why = f"the checkpoint has those of another kind of device ({', '.join(sorted(stored))})"
    if why is not None:
        return None, (f"random generators of all ranks are as the seed sets them: {why}",)
    sizes = {name: facts["tensors"][generator_key(groups.world.rank, name)]["shape"] for name in mine}
    return {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}, ()


def put_back_generators(start: Start) -> None:
    """Restore the generators; right before the first forward pass, so that nothing moves them again."""
    if start.generators is not None:
        restore_generators(start.generators)
