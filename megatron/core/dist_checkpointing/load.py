"""Load: read this rank's pieces, check every file's bytes meanwhile, and prove by digests that everything arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.config.errors import DamagedInputError
from megatron.core.dist_checkpointing.checkpoint_group import CheckpointGroup
from megatron.core.dist_checkpointing.facts import FACTS_FILE, Facts, file_problem
from megatron.core.dist_checkpointing.flat_tensor import (
    StoredPiece,
    TensorFacts,
    add_digests,
    digests_of,
    state_dict_of,
)
from megatron.core.dist_checkpointing.progress import progress_of_rank
from megatron.core.dist_checkpointing.reader import FolderReader
from megatron.core.dist_checkpointing.writer import MAX_FILES

_NAMED = 5


def require_same_tensors(
    folder: Path, facts: Facts, wanted: Sequence[StoredPiece], group: CheckpointGroup, kinds: Sequence[str]
) -> None:
    """Every stored tensor is wanted by a rank, every wanted one is stored, in the same shape and type.

    ``kinds`` are the first words (up to the dot) of the keys that are looked at.

    Raises:
        DamagedInputError: on all ranks: this checkpoint is of another model; names what differs.
    """
    mine = {piece.key: piece.facts for piece in wanted if piece.key.split(".", 1)[0] in kinds}
    every: dict[str, TensorFacts] = {}
    for rank in group.gather(mine):
        every |= rank
    stored = {key for key in facts["tensors"] if key.split(".", 1)[0] in kinds}
    wrong = [f"{key} is in the model and not in the checkpoint" for key in sorted(every.keys() - stored)]
    wrong += [f"{key} is in the checkpoint and not in the model" for key in sorted(stored - every.keys())]
    for key in sorted(stored & every.keys()):
        theirs, ours = TensorFacts.stated(facts["tensors"][key]), every[key]
        if theirs != ours:
            wrong.append(f"{key} is {_words(theirs)} in the checkpoint and {_words(ours)} in the model")
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise DamagedInputError(f"{folder} is a checkpoint of another model: {'; '.join(wrong[:_NAMED])}{more}")


def _words(facts: TensorFacts) -> str:
    return f"{facts.dtype}{list(facts.shape)} in {facts.shards} shards"


def _files_to_check(facts: Facts, group: CheckpointGroup) -> list[tuple[str, dict[str, Any]]]:
    """This rank's part of the files. It checks those that it wrote and will read, so that they are read once."""
    mine = []
    for i, (name, stated) in enumerate(sorted(facts["files"].items())):
        owner = name.strip("_").split("_")[0]
        if (int(owner) if owner.isdecimal() else i) % group.size == group.rank:
            mine.append((name, stated))
    return mine


def load_pieces(folder: Path, facts: Facts, wanted: Sequence[StoredPiece], group: CheckpointGroup) -> None:
    """Fill the values of all pieces from the checkpoint, and prove it: every file has the bytes that were written, and
    every tensor, each copy of it too, the digest it was saved with.

    Call it on all ranks; together they want every tensor whole, once by each number of a copy.

    Raises:
        DamagedInputError: on all ranks: files are damaged, or cannot be read, or a tensor arrived otherwise; names
            them.
    """
    with ThreadPoolExecutor(MAX_FILES, thread_name_prefix="checkpoint-hash") as pool:
        checked = pool.map(lambda file: file_problem(folder, *file), _files_to_check(facts, group))
        failure = _read(folder, wanted, group)
        problems = [problem for problem in checked if problem is not None]
    damaged = [problem for rank in group.gather(problems) for problem in rank]
    if damaged:
        raise DamagedInputError(f"checkpoint {folder} is damaged: {'; '.join(damaged)}")
    failures = group.failures(failure)
    if failures:
        raise DamagedInputError(f"checkpoint {folder} cannot be loaded: {'; '.join(failures)}")
    wrong = _arrived_otherwise(facts, wanted, group)
    if wrong:
        named = ", ".join(wrong[:_NAMED])
        raise DamagedInputError(f"{folder / FACTS_FILE}: not the values that were saved, after loading: {named}")


def _arrived_otherwise(facts: Facts, wanted: Iterable[StoredPiece], group: CheckpointGroup) -> list[str]:
    """Keys of which a copy has another digest than the stated one; the same list on all ranks."""
    copies: dict[int, list[StoredPiece]] = {}
    for piece in wanted:
        copies.setdefault(piece.copy, []).append(piece)
    by_rank = group.gather({copy: digests_of(pieces) for copy, pieces in copies.items()})
    wrong: dict[str, None] = {}
    for copy in sorted({copy for rank in by_rank for copy in rank}):
        digests = add_digests(rank.get(copy, {}) for rank in by_rank)
        wrong |= {key: None for key, digest in digests.items() if facts["tensors"][key]["digest"] != digest}
    return list(wrong)


def _read(folder: Path, wanted: Iterable[StoredPiece], group: CheckpointGroup) -> str | None:
    state = state_dict_of(wanted)
    if not state:
        return None
    total = sum(values.nbytes for tensor in state.values() for _, values in tensor.chunks)
    progress = progress_of_rank(f"loading checkpoint {folder}", total, shown=group.is_first)
    try:
        with torch.no_grad():
            # Every rank plans for itself what to read where; nothing has to be agreed on.
            dcp.load(state, storage_reader=FolderReader(folder, progress), no_dist=True)
    except CheckpointException as error:
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    except DamagedInputError as error:
        return str(error)
    return None
