"""From settings to data sets: splits, blends, the cache over ranks, and what is refused before anyone waits."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import CacheEntry
from megatron.core.tokenizers.null import NullTokenizer
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.data.provider import Splits, build_datasets, data_digest, tokenizer_from
from tests.support.data import SelfData, write_documents, write_self_data

TOKENIZER = NullTokenizer(4096)
LENGTHS = tuple(range(20, 60, 2))


@pytest.fixture
def data(tmp_path: Path) -> SelfData:
    return write_self_data(tmp_path, LENGTHS, vocab_size=4096)


def _build(config: DataConfig, sizes=(20, 4, 4), tokenizer=TOKENIZER, seed=1234, turn="run", **options) -> Splits:
    options = {"sequence_length": 8, "meet": lambda wrong: wrong, **options}
    return build_datasets(config, tokenizer, seed=seed, sizes=sizes, turn=turn, **options)


def _documents(data: SelfData, dataset: GPTDataset | None) -> set[int]:
    assert dataset is not None
    return {data.place(token)[0] for i in range(len(dataset)) for token in dataset.raw(i)}


def test_splits_share_no_document(data: SelfData):
    splits = _build(DataConfig(data_path=(data.prefix,), split="70,20,10"), sizes=(None, None, None))
    found = [_documents(data, d) for d in splits.by_name().values()]
    assert found == [set(range(14)), set(range(14, 18)), {18, 19}]
    assert splits.absent == {}


def test_train_has_at_least_what_is_asked(data: SelfData):
    splits = _build(DataConfig(data_path=(data.prefix,), split="70,20,10"), sizes=(300, 40, 3))
    assert [len(d) >= n for d, n in zip(splits.by_name().values(), (300, 40, 3), strict=True)] == [True] * 3
    assert isinstance(splits.train[299]["tokens"], np.ndarray)


def test_cache_is_made_beside_the_data_and_used(data: SelfData):
    config = DataConfig(data_path=(data.prefix,), split="70,20,10")
    first = _build(config)
    folder = Path(data.prefix) / "cache" / "GPTDataset_indices"
    names = {p.name.split("-", 1)[1] for p in folder.iterdir()}
    affixes = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy", "checksums.json")
    ranges = {f"TokenRange-{a}" for a in ("description.txt", "token_range.npy", "checksums.json")}
    assert names == {f"GPTDataset-{s}-{a}" for s in ("train", "valid", "test") for a in affixes} | ranges
    times = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    second = _build(config, turn="others")
    assert data_digest(first) == data_digest(second)
    assert isinstance(second.train.indices.sample_index, np.memmap)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == times
    described = json.loads(next(folder.glob("*-train-description.txt")).read_text())
    assert list(described) == [
        "class",
        "dataset_path",
        "num_samples",
        "index_split",
        "random_seed",
        "sequence_length",
        "split",
        "split_matrix",
        "tokenizer",
    ]


def test_without_cache_nothing_is_written(data: SelfData, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    splits = _build(DataConfig(data_path=(data.prefix,), split="70,20,10"), use_cache=False, turn="others")
    assert sorted(tmp_path.rglob("*")) == before
    assert data_digest(splits) == data_digest(_build(DataConfig(data_path=(data.prefix,), split="70,20,10")))


class _Meeting:
    """Three ranks as threads; the first is the run's, the second another machine's."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(3, timeout=20)
        self.wrong: list[str] = []
        self.found: dict[str, str] = {}

    def meet(self, wrong: str | None) -> str | None:
        self.wrong += [] if wrong is None else [wrong]
        self.barrier.wait()
        found = self.wrong[0] if self.wrong else None
        self.barrier.wait()
        return found

    def run(self, configs: dict[str, DataConfig]) -> dict[str, str]:
        """Digest or error of every rank, by turn."""
        threads = [threading.Thread(target=self._rank, args=item) for item in configs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.found

    def _rank(self, turn: str, config: DataConfig) -> None:
        try:
            self.found[turn] = data_digest(_build(config, sizes=(30, 0, 0), turn=turn, meet=self.meet))
        except (ConfigError, DamagedInputError) as error:
            self.found[turn] = f"{type(error).__name__}: {error}"


TURNS = ("run", "machine", "others")


def test_ranks_meet_and_agree(data: SelfData, tmp_path: Path):
    config = DataConfig(data_path=("1", data.prefix, "2", data.prefix), data_cache_path=str(tmp_path / "cache"))
    found = _Meeting().run(dict.fromkeys(TURNS, config))
    assert len(found) == 3 and len(set(found.values())) == 1


def test_every_machine_may_have_a_cache_of_its_own(data: SelfData, tmp_path: Path):
    here, there = (DataConfig(data_path=(data.prefix,), data_cache_path=str(tmp_path / n)) for n in ("here", "there"))
    found = _Meeting().run({"run": here, "machine": there, "others": there})
    assert len(set(found.values())) == 1
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("here", "there")]
    assert names[0] == names[1] != []
    # A rank whose machine has no cache is told what to change.
    other = DataConfig(data_path=(data.prefix,), data_cache_path=str(tmp_path / "nobody"))
    found = _Meeting().run({"run": here, "machine": there, "others": other})
    assert "the first rank of this machine wrote no such indices" in found["others"]
    assert found["run"] == found["machine"]


@pytest.mark.parametrize("kind", [DamagedInputError, OSError])
def test_failure_of_one_builder_ends_all(
    kind: type[Exception], data: SelfData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the other ranks would wait for one that is gone."""
    config = DataConfig(data_path=(data.prefix,), split="1", data_cache_path=str(tmp_path / "cache"))

    def broken(entry: CacheEntry, arrays: object) -> None:
        raise kind(f"{entry.folder}: planted")

    monkeypatch.setattr(CacheEntry, "store", broken)
    found = _Meeting().run(dict.fromkeys(TURNS, config))
    assert found["run"].endswith("cache: planted")
    assert found["machine"] == found["others"]
    assert found["others"].endswith("as another rank did: " + found["run"].removeprefix("DamagedInputError: "))


def test_what_one_rank_cannot_open_ends_all(data: SelfData, tmp_path: Path):
    """A machine whose own disk lacks the files: the other ranks must not wait for it."""
    good, bad = DataConfig(data_path=(data.prefix,)), DataConfig(data_path=(str(tmp_path / "none"),))
    found = _Meeting().run({"run": good, "machine": good, "others": bad})
    assert "none.idx and" in found["others"] and "change --data-path" in found["others"]
    assert found["run"] == found["machine"]
    assert "as another rank did: " in found["run"] and "none.idx and" in found["run"]


def test_refused_at_the_first_meeting(data: SelfData, tmp_path: Path):
    (tmp_path / "file").touch()
    cases = [
        (DataConfig(data_path=(str(tmp_path / "none"),)), DamagedInputError, "none.idx"),
        (DataConfig(data_path=(data.prefix,), mock_data=True), ConfigError, "--mock-data"),
        (
            DataConfig(data_path=(data.prefix,), data_cache_path=str(tmp_path / "file")),
            ConfigError,
            "--data-cache-path",
        ),
        (
            DataConfig(data_path=(data.prefix,), split="0,1,1"),
            ConfigError,
            "no train data .*left out by --split.*change: --split or --data-path$",
        ),
        (DataConfig(data_path=(data.prefix,), split="1000,1,1"), ConfigError, "no valid data .*hold no tokens"),
        (DataConfig(data_path=("1", data.prefix, "x", "y")), ConfigError, "'x' is a prefix with no weight before it"),
        (DataConfig(data_args_path=str(tmp_path / "none")), ConfigError, "--data-args-path"),
        (DataConfig(per_split_data_args_path=str(tmp_path / "file")), ConfigError, "not JSON"),
        (DataConfig(valid_data_path=(data.prefix,)), ConfigError, "no train data .*--train-data-path"),
    ]
    for config, error, message in cases:
        for turn in TURNS:
            met: list[str | None] = []
            with pytest.raises(error, match=message):
                _build(config, turn=turn, meet=lambda wrong, met=met: met.append(wrong) or wrong)
            (said,) = met
            assert re.search(message, said)


def test_split_that_is_absent_says_why(data: SelfData):
    splits = _build(DataConfig(data_path=(data.prefix,), split="1000,0,1"), sizes=(20, 4, 4))
    assert splits.valid is None and splits.test is None
    assert splits.absent["valid"].reason == "left out by --split"
    assert "which hold no tokens" in splits.absent["test"].reason
    splits = _build(DataConfig(data_path=(data.prefix,), split="8,1,1"), sizes=(20, 0, None), sequence_length=200)
    assert splits.absent["valid"].reason == "no samples were asked for"
    assert "one sample needs 201" in splits.absent["test"].reason


def test_empty_data_set_is_refused(tmp_path: Path):
    write_documents(str(tmp_path / "empty"), [])
    write_documents(str(tmp_path / "hollow"), [[], []])
    for name in ("empty", "hollow"):
        with pytest.raises(ConfigError, match="no train data"):
            _build(DataConfig(data_path=(str(tmp_path / name),), split="1"), sizes=(5, 0, 0))


def test_order_follows_seed_and_samples_only(data: SelfData, tmp_path: Path):
    config = DataConfig(data_path=(data.prefix,), split="1")
    base = data_digest(_build(config, sizes=(20, 0, 0)))
    moved = tmp_path / "moved"
    moved.mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(f"{data.prefix}.{suffix}", moved / f"other.{suffix}")
    assert data_digest(_build(DataConfig(data_path=(str(moved / "other"),), split="1"), sizes=(20, 0, 0))) == base
    assert data_digest(_build(config, sizes=(20, 0, 0), seed=1)) != base
    assert data_digest(_build(config, sizes=(200, 0, 0))) != base
    assert data_digest(_build(config, sizes=(20, 0, 0), tokenizer=NullTokenizer(4096, eod_id=7))) != base


def test_data_written_anew_under_the_same_path_are_indexed_anew(tmp_path: Path):
    config = DataConfig(data_path=(str(tmp_path / "self"),), split="1")
    write_self_data(tmp_path, (30, 40), vocab_size=4096)
    old = _build(config, sizes=(8, 0, 0))
    write_self_data(tmp_path, (40, 30), vocab_size=4096)
    with pytest.raises(DamagedInputError, match="wrote no such indices"):
        _build(config, sizes=(8, 0, 0), turn="others")
    new = _build(config, sizes=(8, 0, 0))
    assert data_digest(new) != data_digest(old)
    for i in range(len(new.train)):
        new.train.raw(i)


def test_blends(tmp_path: Path):
    sets = [write_self_data(tmp_path, (50,) * n, name=f"d{n}", vocab_size=4096) for n in (4, 8)]
    a, b = (s.prefix for s in sets)
    weighted = _build(DataConfig(data_path=("1", a, "3", b), split="1"), sizes=(40, 0, 0)).train
    assert isinstance(weighted, BlendedDataset)
    assert np.bincount(weighted.dataset_index).tolist() == [10, 30]
    unweighted = _build(DataConfig(data_path=(a, b, b), split="1"), sizes=(None, 0, 0)).train
    assert np.bincount(unweighted.dataset_index).tolist() == [24, 49, 49]
    part = _build(DataConfig(data_path=(a, b, b), split="1"), sizes=(20, 0, 0)).train
    assert len(part) == 20
    assert isinstance(_build(DataConfig(data_path=("2", a), split="1"), sizes=(5, 0, 0)).train, BlendedDataset)
    assert isinstance(_build(DataConfig(train_data_path=("2", a)), sizes=(5, 0, 0)).train, GPTDataset)


def test_blend_with_a_member_that_is_empty_in_a_split(tmp_path: Path):
    one = write_self_data(tmp_path, (100,), name="one", vocab_size=4096).prefix
    many = write_self_data(tmp_path, (50,) * 20, name="many", vocab_size=4096).prefix
    valid = _build(DataConfig(data_path=(one, many), split="9,1,0"), sizes=(20, 5, 0)).valid
    assert [member.source.path for member in valid.members] == [many]
    with pytest.raises(ConfigError, match=r"no valid data \(.*/one: .*hold no tokens"):
        _build(DataConfig(data_path=("1", one, "1", many), split="9,1,0"), sizes=(20, 5, 0))


def test_data_per_split_and_from_files(data: SelfData, tmp_path: Path):
    other = write_self_data(tmp_path, (100,) * 3, name="other", vocab_size=4096).prefix
    direct = _build(DataConfig(train_data_path=(data.prefix,), valid_data_path=(other,)))
    assert {name: a.reason for name, a in direct.absent.items()} == {"test": "left out by --test-data-path"}
    assert _documents(data, direct.train) == set(range(len(LENGTHS)))
    (tmp_path / "per_split.json").write_text(json.dumps({"train": [data.prefix], "valid": [other]}))
    assert data_digest(_build(DataConfig(per_split_data_args_path=str(tmp_path / "per_split.json")))) == data_digest(
        direct
    )
    (tmp_path / "words").write_text(f" 1 {data.prefix}\n 2 {other}\n")
    by_file = _build(DataConfig(data_args_path=str(tmp_path / "words"), split="1"), sizes=(9, 0, 0))
    by_flag = _build(DataConfig(data_path=("1", data.prefix, "2", other), split="1"), sizes=(9, 0, 0))
    assert data_digest(by_file) == data_digest(by_flag)


def test_members_are_built_by_threads_with_one_result(data: SelfData, tmp_path: Path):
    words = tuple(word for n in range(1, 6) for word in (str(n), data.prefix))
    digests = {
        data_digest(_build(DataConfig(data_path=words, num_dataset_builder_threads=threads), use_cache=False))
        for threads in (1, 4)
    }
    assert len(digests) == 1


def test_mock_data(tmp_path: Path):
    splits = _build(DataConfig(mock_data=True), sizes=(16, 8, 8), tokenizer=NullTokenizer(100), sequence_length=4096)
    assert all(d is not None for d in splits.by_name().values())
    assert splits.train.raw(0).max() < 100
    with pytest.raises(ConfigError, match="--tokenizer-type"):
        _build(DataConfig(mock_data=True), tokenizer=None)


@pytest.mark.parametrize("mapped", [True, False])
def test_reading_the_file_in_pieces_changes_nothing(data: SelfData, mapped: bool):
    splits = _build(DataConfig(data_path=(data.prefix,), split="1", mmap_bin_files=mapped), sizes=(20, 0, 0))
    assert [splits.train[i]["tokens"].tolist() for i in range(3)] == [
        splits.train.raw(i)[:-1].tolist() for i in range(3)
    ]
    assert data_digest(splits) == data_digest(_build(DataConfig(data_path=(data.prefix,), split="1"), sizes=(20, 0, 0)))


@pytest.mark.parametrize("turn", ["run", "machine"])
def test_id_outside_the_vocabulary_stops_before_a_sample_is_read(tmp_path: Path, turn: str):
    """Whether a sample of the run would hold it or not: document 1 is in no split that is asked for."""
    write_documents(str(tmp_path / "d"), [[1] * 99, [2, 600, 3] * 3])
    config = DataConfig(data_path=(str(tmp_path / "d"),), split="1,1", data_cache_path=str(tmp_path / "cache"))
    message = r"/d.bin: token id 600 at position 1 of document 1 is outside .* of 512 ids; change --data-path"
    for _ in range(2):  # the second time from the cache
        with pytest.raises(DamagedInputError, match=message):
            _build(config, sizes=(4, 0, 0), tokenizer=NullTokenizer(512), turn=turn)
    assert len(_build(config, sizes=(4, 0, 0), tokenizer=NullTokenizer(601), turn=turn).train) >= 4


def test_without_cache_ids_are_checked_in_samples(tmp_path: Path):
    write_documents(str(tmp_path / "d"), [[1] * 9, [2, 600, 3] * 3])
    config = DataConfig(data_path=(str(tmp_path / "d"),), split="1")
    train = _build(config, sizes=(4, 0, 0), tokenizer=NullTokenizer(512), use_cache=False).train
    with pytest.raises(DamagedInputError, match=r"/d: token id 600 at position 1 of document 1 .* 512 ids"):
        [train[i] for i in range(len(train))]


def test_tokenizer_from_settings():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50, null_tokenizer_eod_id=3)
    assert (tokenizer_from(config).vocab_size, tokenizer_from(config).eod) == (50, 3)


def test_a_damaged_tokenizer_file_is_named_with_its_flag(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(DamagedInputError, match=r"tokenizer\.json.*; change --tokenizer-model, or --tokenizer-type"):
        tokenizer_from(config)
