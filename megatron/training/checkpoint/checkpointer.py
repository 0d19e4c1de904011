"""Checkpointer: everything the training loop does with checkpoints."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError, Problem, SaveFailedError
from megatron.core.contracts.stage import Stage
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup
from megatron.core.dist_checkpointing.facts import Facts
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, digests_of
from megatron.core.dist_checkpointing.folder import complete_iterations, iteration_folder, require_writable
from megatron.core.dist_checkpointing.save import FolderTakenError, SaveRequest, delete_superseded, save_checkpoint
from megatron.core.optimizer.distrib_optimizer import Optimizer
from megatron.core.optimizer.optimizer_param_scheduler import Schedule
from megatron.core.process_groups.groups import ProcessGroups
from megatron.core.process_groups.topology import LogicalLayout
from megatron.training.checkpoint.background import Background, Snapshots
from megatron.training.checkpoint.content import (
    MASTERS,
    MOMENTS,
    generator_pieces,
    parameter_pieces,
    router_pieces_to_save,
)
from megatron.training.checkpoint.position import Position
from megatron.training.checkpoint.restore import Start, put_back_generators, require_agreement, restore
from megatron.training.config.manifest import (
    differences,
    flag_of,
    save_folder_problems,
    shown_value,
    sources_part,
    with_sources,
)
from megatron.training.config.resume_rules import Source, find_source, saying_what_to_change
from megatron.training.config.run import RunConfig
from megatron.training.setup.seeds import generator_states

Tell = Callable[[str, int, Mapping[str, Sequence[int]]], None]
"""Told what happens to the checkpoint of an iteration, with this rank's digests by key where there are any."""


class Checkpointer:
    """Loads at the start, saves when due, waits at the end; all methods are collective.

    Call ``load``; train inside ``begin``, with ``restore_generators`` right before the first step and ``after_step``
    after every one.

    Args:
        config: the settings of the run, complete.
        layout: its logical layout.
        optimizer, chunks: what is saved and filled.
        groups: the ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: LogicalLayout,
        *,
        optimizer: Optimizer,
        chunks: Sequence[Stage],
        groups: ProcessGroups,
    ) -> None:
        self._config, self._layout, self._settings = config, layout, config.checkpoint
        self._optimizer, self._chunks, self._groups = optimizer, chunks, groups
        self._background, self._snapshots = Background(), Snapshots()
        self._trajectory: dict[str, Any] = {}
        self._schedule: Schedule | None = None
        self._before_save: Callable[[], None] | None = None
        self._tell: Tell | None = None
        self._saving: int | None = None
        self._start = Start()
        self._source: Source | None = None
        self._saved_at: int | None = None
        self._own: frozenset[int] = frozenset()
        active = self._settings.save is not None or self._settings.load is not None
        active = active or self._settings.pretrained_checkpoint is not None
        self._group: CheckpointGroup | None = None
        if active:
            self._group = CheckpointGroup(groups.world, config.distributed.distributed_timeout_minutes)
            self._require_folder(self._group)

    def _require_folder(self, group: CheckpointGroup) -> None:
        if self._settings.save is None:
            return
        error = None
        if group.is_first:
            try:
                require_writable(Path(self._settings.save))
                self._own = frozenset(complete_iterations(Path(self._settings.save)))
            except OSError as failure:
                error = f"{failure.filename or self._settings.save}: {failure.strerror}"
        failures = group.failures(error)
        if failures:
            needed = "a folder that can be written"
            raise ConfigError([Problem(f"--save {self._settings.save} ({'; '.join(failures)})", needed, "--save")])

    def load(self) -> Start:
        """Load what the settings name, if anything, into the optimizer and the model.

        Raises:
            DamagedInputError: see ``restore``; or ranks see different checkpoints.
        """
        source = self._source = find_source(self._settings) if self._group is not None else None
        if self._group is not None:
            with saying_what_to_change(self._settings):
                require_agreement(source, self._group)
        if source is not None and self._group is not None:
            started = time.monotonic()
            with saying_what_to_change(self._settings):
                self._start = restore(
                    source,
                    self._config,
                    optimizer=self._optimizer,
                    chunks=self._chunks,
                    groups=self._groups,
                    group=self._group,
                )
            self._say(f"loading and proving the checkpoint took {time.monotonic() - started:.2f} s")
            here = self._settings.save is not None and source.folder.parent.samefile(self._settings.save)
            self._saved_at = self._start.position.iteration if here else None
        elif self._settings.load is not None:
            self._say(f"no checkpoint in {self._settings.load}: starting from the seed")
        for words in self._start.words:
            self._say(words)
        return self._start

    def trajectory_with_branches(self, trajectory: dict[str, Any]) -> dict[str, Any]:
        """The trajectory part of the manifest, with where it comes from.

        A setting that is not the checkpoint's is announced, and is a branch: the steps before it were other ones.
        """
        stored, branches = self._start.stored_trajectory, list(self._start.branches)
        if stored is not None:
            if self._start.schedule is not None:
                trajectory = _with_stored_schedule(trajectory, stored)
            changed = differences({k: v for k, v in stored.items() if k != "branches"}, trajectory)
            mine = sources_part(self._config.with_effect("operational"))
            facts = self._source.facts if self._source else {}
            for path, then, now in with_sources(changed, facts.get("sources", mine), mine):
                before, here = shown_value(path, then), shown_value(path, now)
                self._say(f"not as in the checkpoint: {flag_of(path)} was {before!r}, is {here!r}")
            if changed:
                at, paths = self._start.position.iteration, {path: [then, now] for path, then, now in changed}
                branches.append({"iteration": at, "why": ["settings"], "changed": paths})
        return {**trajectory, "branches": branches} if branches else trajectory

    def require_own_folder(self, trajectory: dict[str, Any]) -> None:
        """Before anything is written: the checkpoints in the folder to save into are those of this run.

        Raises:
            ConfigError: on all ranks: see ``save_folder_problems``.
        """
        if self._group is None:
            return
        mine = save_folder_problems(self._config, self._source, trajectory) if self._group.is_first else []
        problems = self._group.gather(mine)[0]
        if problems:
            raise ConfigError(problems)

    @contextlib.contextmanager
    def begin(
        self,
        trajectory: dict[str, Any],
        schedule: Schedule,
        *,
        before_save: Callable[[], None] | None = None,
        tell: Tell | None = None,
    ) -> Iterator[None]:
        """While the run trains: what it is, for its checkpoints. ``before_save`` is called before each of them, for
        what must be out before a later run goes on from there; ``tell`` when a save starts, and when it is known to be
        complete. At the end of the block what goes on in the background is waited for, also on the way out of an error.

        Raises:
            SaveFailedError: that save failed. After another error its words are only printed.
        """
        self._trajectory, self._schedule = trajectory, schedule
        self._before_save, self._tell = before_save, tell
        try:
            yield
        except BaseException:
            self._finish_quietly()
            raise
        self._wait()

    @property
    def position(self) -> Position:
        """Where the run starts."""
        return self._start.position

    def restore_generators(self) -> None:
        """Right before the first forward pass, so that nothing moves them again."""
        put_back_generators(self._start)

    def after_step(self, position: Position, *, leaving: bool) -> None:
        """Save if it is due, or if the run ends here; at most once per iteration. A checkpoint that was loaded from the
        same folder counts as saved.

        Raises:
            SaveFailedError: this save failed, or the one in the background before it; then this one was tried too.
        """
        interval = self._settings.save_interval
        if self._settings.save is None or interval is None or position.iteration == self._saved_at:
            return
        if leaving or position.iteration % interval == 0:
            self._save(position)
            self._saved_at = position.iteration

    def _save(self, position: Position) -> None:
        if self._before_save is not None:
            self._before_save()
        start = time.monotonic()
        try:
            waited = self._wait()
        except FolderTakenError:
            raise
        except SaveFailedError:
            # The run ends here. What it has reached since is kept, where the disk takes it by now.
            with contextlib.suppress(SaveFailedError):
                self._write(position, asynchronous=False)
            raise
        self._write(position, asynchronous=self._settings.async_save)
        if self._settings.async_save:
            stall = time.monotonic() - start
            self._say(f"training went on after {stall * 1000:.0f} ms ({waited * 1000:.0f} ms for the save before)")

    def _write(self, position: Position, *, asynchronous: bool) -> None:
        start, root, group = time.monotonic(), Path(self._settings.save), self._group
        self._say(f"saving checkpoint at iteration {position.iteration:7d} to {root} in torch_dist format")
        may_replace = position.iteration in self._own
        if may_replace and iteration_folder(root, position.iteration).exists():
            self._say(f"it takes the place of the checkpoint of iteration {position.iteration} that is there")
        pieces = [piece for piece in self._pieces() if piece.written]
        digests = digests_of(pieces)
        self._saving = position.iteration
        if self._tell is not None:
            self._tell("save_started", position.iteration, digests)
        request = SaveRequest(
            root=root,
            iteration=position.iteration,
            pieces=self._snapshots.take(pieces) if asynchronous else pieces,
            digests=digests,
            facts=self._facts(position),
            may_replace=may_replace,
        )
        own = self._own = self._own | {position.iteration}

        def save() -> None:
            save_checkpoint(request, group)
            seconds = time.monotonic() - start
            self._say(
                f"successfully saved checkpoint from iteration {position.iteration:7d} to {root} in {seconds:.2f} s"
            )

        def delete() -> None:
            if group is None or group.is_first:
                delete_superseded(root, position.iteration, self._settings.save_retain_interval, own)

        def save_and_delete() -> None:
            save()
            delete()

        if asynchronous:
            self._background.start(save_and_delete)
        else:
            save()
            self._wait()
            self._background.start(delete)

    def _wait(self) -> float:
        """Wait for a save in the background; returns the seconds that took."""
        waited = self._background.wait()
        if self._saving is not None and self._tell is not None:
            self._tell("save_finished", self._saving, {})
        self._saving = None
        return waited

    def digests(self) -> dict[str, list[int]]:
        """Digests of what this rank holds of the state that checkpoints keep, by key."""
        return digests_of(piece for piece in self._pieces() if piece.written)

    def _pieces(self) -> list[StoredPiece]:
        """What this rank holds of the run's state."""
        kinds = (MASTERS, *(MOMENTS if self._settings.save_optim else ()))
        pieces = [*parameter_pieces(self._optimizer, kinds), *router_pieces_to_save(self._chunks, self._groups)]
        if self._settings.save_rng:
            pieces += generator_pieces(generator_states(), self._groups.world.rank)
        return pieces

    def _facts(self, position: Position) -> Facts:
        consumed, settings = position.consumed_train_samples, self._settings
        return {
            "iteration": position.iteration,
            "consumed_train_samples": consumed,
            "consumed_valid_samples": position.consumed_valid_samples,
            "step_count": self._optimizer.step_count if settings.save_optim else None,
            "schedule": asdict(self._schedule),
            "schedule_position": consumed - self._start.schedule_start,
            "logical_layout": asdict(self._layout),
            "physical_layout": asdict(self._groups.topology),
            "distributed_optimizer": self._config.optimizer.use_distributed_optimizer,
            "hybrid_layer_pattern": self._config.model.hybrid_layer_pattern,
            "has_optimizer": settings.save_optim,
            "has_generators": settings.save_rng,
            "branches": self._trajectory.get("branches", []),
            "trajectory": self._trajectory,
            "layout": self._config.with_effect("layout"),
            "sources": sources_part(self._config.with_effect("operational")),
        }

    def _finish_quietly(self) -> None:
        try:
            self._background.wait()
        except SaveFailedError as error:
            print(f"error on rank {self._groups.world.rank}: {error}", flush=True)

    def _say(self, words: str) -> None:
        if self._groups.world.is_first:
            # One write a line: a save in the background speaks while training does.
            sys.stdout.write(words + "\n")
            sys.stdout.flush()


def _with_stored_schedule(trajectory: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """With --use-checkpoint-opt-param-scheduler the checkpoint's settings of the schedule are those in effect."""
    mine, theirs = trajectory["recipe"], stored["recipe"]
    curve = {name: theirs["optimizer"][name] for name in ("lr", "min_lr", "weight_decay")}
    recipe = {**mine, "optimizer": {**mine["optimizer"], **curve}, "scheduler": theirs["scheduler"]}
    return {**trajectory, "recipe": recipe}
