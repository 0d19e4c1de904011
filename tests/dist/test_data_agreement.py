"""Machines that hold copies of the data: equal ones are taken, different ones stop every rank."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron.core.config.errors import DamagedInputError
from megatron.training.config.data import DataConfig
from megatron.training.data.provider import build_datasets
from megatron.training.loop.build import agreed_digest
from tests.support.data import write_self_data
from tests.support.ranks import groups_for_test, run_ranks


def digest_of_own_copy(folder: str, lengths_by_rank: tuple[tuple[int, ...], ...]) -> str:
    """Every rank is a machine with data of its own under its own path."""
    groups = groups_for_test()
    place = Path(folder) / str(dist.get_rank())
    place.mkdir()
    data = write_self_data(place, lengths_by_rank[dist.get_rank()])
    config = DataConfig(data_path=(data.prefix,), split="1")
    splits = build_datasets(config, None, sequence_length=8, seed=1, sizes=(9, 0, 0), turn="machine", meet=bool)
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
    assert "the data of rank 1 are not those of rank 0" in one
