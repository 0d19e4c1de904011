"""Save: every rank writes its pieces aside, the first rank completes the folder and moves it into place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.config.errors import SaveFailedError
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup, name_ranks
from megatron.core.dist_checkpointing.facts import Facts, encode_facts
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, add_digests, state_dict_of
from megatron.core.dist_checkpointing.folder import commit, part_folder, remove_superseded, start_part
from megatron.core.dist_checkpointing.progress import progress_of_rank
from megatron.core.dist_checkpointing.writer import RankWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """One checkpoint to write.

    Attributes:
        root: folder of checkpoints.
        iteration: names it.
        pieces: what this rank writes; nobody may change the values until the save has ended.
        digests: ``digests_of(pieces)``.
        facts: what ``metadata.json`` says, without tensors and files; the same on all ranks.
    """

    root: Path
    iteration: int
    pieces: Sequence[StoredPiece]
    digests: Mapping[str, Sequence[int]]
    facts: Facts


def save_checkpoint(request: SaveRequest, group: CheckpointGroup) -> None:
    """Write the checkpoint; call it on all ranks. When it returns, the checkpoint is complete, on the disk, and the
    newest one.

    Raises:
        SaveFailedError: on all ranks, naming the ranks and files that failed; what was complete before still is.
    """
    failures = group.failures(_start(request, group))
    files: list[Mapping[str, dict]] = []
    if not failures:
        failures, files = _write(request, group)
    if not failures:
        failures = group.failures(_finish(request, group, files, group.gather_on_first(_described(request))))
    if failures:
        raise SaveFailedError(
            f"the checkpoint of iteration {request.iteration} was not saved in {request.root}; what was complete "
            f"before is still there: {'; '.join(failures)}"
        )


def _start(request: SaveRequest, group: CheckpointGroup) -> str | None:
    if not group.is_first:
        return None
    try:
        start_part(request.root, request.iteration)
    except OSError as error:
        return str(error)
    return None


def _write(request: SaveRequest, group: CheckpointGroup) -> tuple[list[str], list[Mapping[str, dict]]]:
    """DCP's save into the part folder: what failed, and on the first rank every rank's files."""
    total = sum(piece.values.numel() * piece.values.element_size() for piece in request.pieces)
    what = f"saving checkpoint at iteration {request.iteration}"
    progress = progress_of_rank(what, total, shown=group.is_first)
    writer = RankWriter(part_folder(request.root, request.iteration), group.rank, progress)
    try:
        dcp.save(
            state_dict_of(request.pieces),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(),
            process_group=group.handle,
            no_dist=group.handle is None,
        )
    except CheckpointException as error:
        texts = {rank: _text(failure[0]) for rank, failure in error.failures.items()}
        return name_ranks([texts.get(rank) for rank in range(group.size)]), []
    return [], group.gather_on_first(writer.files)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


_Described = tuple[Mapping[str, Sequence[int]], Mapping[str, TensorFacts]]


def _described(request: SaveRequest) -> _Described:
    return request.digests, {piece.key: piece.facts for piece in request.pieces}


def _finish(
    request: SaveRequest, group: CheckpointGroup, files: Sequence[Mapping[str, dict]], described: Sequence[_Described]
) -> str | None:
    """On the first rank: write the facts, move folder and marker."""
    if not group.is_first:
        return None
    digests = add_digests(rank for rank, _ in described)
    tensors = {key: facts for _, rank in described for key, facts in rank.items()}
    facts = {
        **request.facts,
        "tensors": {
            key: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "shards": tensor.shards,
                "name": tensor.name,
                "digest": digests[key],
            }
            for key, tensor in sorted(tensors.items())
        },
        "files": {name: of for rank in files for name, of in rank.items()},
    }
    try:
        commit(request.root, request.iteration, encode_facts(facts))
    except OSError as error:
        return str(error)
    return None


def delete_superseded(root: Path, iteration: int, retain_interval: int | None) -> None:
    """On the first rank, behind a save: see ``remove_superseded``. What could not be deleted is a warning.

    No part of the save: a file system takes seconds to delete what it took seconds to write.
    """
    for words in remove_superseded(root, iteration, retain_interval):
        # The checkpoint is complete: it does not matter for it whether anybody can be told.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {words}; the next save tries again\n")
