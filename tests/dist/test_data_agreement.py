"""What one rank finds wrong with the data stops every rank; machines that hold copies of it must hold equal ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.config.errors import DamagedInputError
from megatron.core.tokenizers.null import NullTokenizer
from megatron.training.config.data import DataConfig
from megatron.training.data.provider import build_datasets
from megatron.training.loop.build import agreed_digest, first_of_ranks
from tests.support.data import write_documents, write_self_data
from tests.support.ranks import groups_for_test, run_ranks


def digest_of_own_copy(folder: str, lengths_by_rank: tuple[tuple[int, ...], ...]) -> str:
    """Every rank is a machine with data of its own under its own path."""
    groups = groups_for_test()
    place = Path(folder) / str(dist.get_rank())
    place.mkdir()
    data = write_self_data(place, lengths_by_rank[dist.get_rank()])
    config = DataConfig(data_path=(data.prefix,), split="1")
    splits = build_datasets(
        config, None, sequence_length=8, seed=1, sizes=(9, 0, 0), turn="machine", meet=lambda wrong: wrong
    )
    try:
        return agreed_digest(splits, groups)
    except DamagedInputError as error:
        return str(error)


def test_equal_copies_agree(tmp_path: Path) -> None:
    one, two = run_ranks(2, digest_of_own_copy, str(tmp_path), ((20, 30, 40), (20, 30, 40)))
    assert one == two
    assert len(one) == 64


def test_different_copies_stop_every_rank(tmp_path: Path) -> None:
    one, two = run_ranks(2, digest_of_own_copy, str(tmp_path), ((20, 30, 40), (20, 31, 40)))
    assert one == two
    assert f"the data of rank 1 are not those of rank 0: copies that differ: {tmp_path}/1/" in one


def outcome_of_reading(folder: str, faulty: int, own_copies: bool, vocab_size: int) -> str:
    """Every rank reads data in which 600 is the largest id, or 300 where only the copy of rank ``faulty`` is wrong."""
    groups, rank = groups_for_test(), dist.get_rank()
    place = Path(folder) / (str(rank) if own_copies else "")
    if own_copies or rank == 0:
        place.mkdir(exist_ok=True)
        odd = 600 if rank == faulty or not own_copies else 300
        write_documents(str(place / "data"), [[1] * 30] * 9 + [[1, 2, odd]] + [[2] * 30] * 9)
    dist.barrier()
    turn = "run" if rank == 0 else "machine" if own_copies else "others"
    config = DataConfig(data_path=(str(place / "data"),), split="9,1,0")
    try:
        build_datasets(
            config,
            NullTokenizer(vocab_size),
            sequence_length=8,
            seed=1,
            sizes=(9, 0, 0),
            turn=turn,
            meet=lambda wrong: first_of_ranks(groups, wrong),
        )
    except DamagedInputError as error:
        return str(error)
    finally:
        dist.barrier()  # no rank is left behind in a collective of the data
    return "read"


NAMED = (
    "data.bin",
    "token id 600",
    "position 2 of document 9",
    "512 ids",
    "--data-path",
    "--tokenizer-",
    "--vocab-size",
)


@pytest.mark.parametrize(("own_copies", "faulty"), [(False, 0), (True, 0), (True, 1)])
def test_an_id_outside_the_vocabulary_stops_every_rank(tmp_path: Path, own_copies: bool, faulty: int) -> None:
    """On a disk that all share the first rank sees it; on own disks the first rank of the machine that has it."""
    outcomes = run_ranks(2, outcome_of_reading, str(tmp_path), faulty, own_copies, 512)
    assert all(word in outcomes[faulty] for word in NAMED), outcomes
    why = f"stopped at the data, as another rank did: rank {faulty}: {outcomes[faulty]}"
    assert outcomes[1 - faulty] == why, "the file is named by every rank"
    assert run_ranks(2, outcome_of_reading, str(tmp_path), faulty, own_copies, 601) == ["read", "read"]
