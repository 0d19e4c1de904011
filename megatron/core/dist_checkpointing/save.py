"""Save: every rank writes its pieces aside, the first rank completes the folder and moves it into place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.config.errors import SaveFailedError
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup, name_ranks
from megatron.core.dist_checkpointing.facts import Facts, encode_facts
from megatron.core.dist_checkpointing.flat_tensor import StoredPiece, TensorFacts, add_digests, state_dict_of
from megatron.core.dist_checkpointing.folder import (
    FolderInUseError,
    PartFolder,
    commit,
    part_folder,
    remove_superseded,
    require_free,
    start_part,
)
from megatron.core.dist_checkpointing.progress import progress_of_rank
from megatron.core.dist_checkpointing.writer import RankWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """One checkpoint to write.

    Attributes:
        root: folder of checkpoints.
        may_replace: whether a checkpoint of this iteration that is there may go.
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
    may_replace: bool = True


class FolderTakenError(SaveFailedError):
    """Another process saves into the same folder. A second attempt would take away what that process writes."""


def save_checkpoint(request: SaveRequest, group: CheckpointGroup) -> None:
    """Write the checkpoint; call it on all ranks. When it returns, the checkpoint is complete, on the disk, and the
    newest one.

    Raises:
        SaveFailedError: on all ranks, naming the ranks and files that failed; what was complete before still is.
    """
    part, error = _start(request) if group.is_first else (None, None)
    failures = group.failures(_text(error))
    files: list[Mapping[str, dict]] = []
    if not failures:
        failures, files = _write(request, group)
        error = part.taken() if failures and part is not None else None
    if not failures:
        described = group.gather_on_first(_described(request))
        error = None if part is None else _finish(request, part, files, described)
        failures = group.failures(_text(error))
    if failures:
        raise _failed(request, failures, group.gather(_text(error) if isinstance(error, FolderInUseError) else None)[0])


def _failed(request: SaveRequest, failures: Sequence[str], taken: str | None) -> SaveFailedError:
    where = f"the checkpoint of iteration {request.iteration} was not saved in {request.root}"
    if taken is not None:
        why = failures if any(taken in each for each in failures) else [taken, *failures]
        return FolderTakenError(f"{where}; what was complete before is still there: {'; '.join(why)}")
    return SaveFailedError(
        f"{where}: {'; '.join(failures)}; what was complete before is still there and can be loaded; change: make room "
        "there or set right what is named, or another --save"
    )


def _start(request: SaveRequest) -> tuple[PartFolder | None, OSError | None]:
    try:
        if not request.may_replace:
            require_free(request.root, request.iteration)
        return start_part(request.root, request.iteration), None
    except OSError as error:
        return None, error


def _write(request: SaveRequest, group: CheckpointGroup) -> tuple[list[str], list[Mapping[str, dict]]]:
    """DCP's save into the part folder: what failed, and on the first rank every rank's files."""
    total = sum(piece.values.nbytes for piece in request.pieces)
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


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, FileExistsError):
        return f"{error}, which another process has written: a --save folder belongs to one job"
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


_Described = tuple[Mapping[str, Sequence[int]], Mapping[str, TensorFacts]]


def _described(request: SaveRequest) -> _Described:
    return request.digests, {piece.key: piece.facts for piece in request.pieces}


def _finish(
    request: SaveRequest, part: PartFolder, files: Sequence[Mapping[str, dict]], described: Sequence[_Described]
) -> OSError | None:
    """On the first rank: write the facts, move folder and marker."""
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
        commit(part, encode_facts(facts))
    except FileNotFoundError as error:
        return part.taken() or error
    except OSError as error:
        return error
    return None


def delete_superseded(
    root: Path, iteration: int, retain_interval: int | None, own: Collection[int] | None = None
) -> None:
    """On the first rank, behind a save: see ``remove_superseded``. What could not be deleted is a warning.

    No part of the save: a file system takes seconds to delete what it took seconds to write.
    """
    for words in remove_superseded(root, iteration, retain_interval, own):
        # The checkpoint is complete: it does not matter for it whether anybody can be told.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {words}; the next save tries again\n")
