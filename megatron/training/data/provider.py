"""From settings to data sets: opened, checked, indexed and cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.datasets.blend_indices import BLEND_NAMES, build_blend_indices, build_exhaustive_indices
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleRules
from megatron.core.datasets.gpt_indices import INDEX_NAMES, build_indices
from megatron.core.datasets.index_cache import CachedArrays, CacheEntry, cache_key, digested
from megatron.core.datasets.indexed_dataset import IndexedDataset, TokenSource
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.split_plan import Absent, MemberPlan, SplitPlan, plan_split
from megatron.core.datasets.splits import SPLIT_NAMES
from megatron.core.datasets.token_range import RANGE_NAMES, require_ids_within
from megatron.core.tokenizers.base import NO_PAD, Tokenizer, loss_pad_id
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.data_sources import DataSources, data_sources, naming_source

Dataset = GPTDataset | BlendedDataset

Turn = Literal["run", "machine", "others"]
"""The role of a rank when sample indices are made: the first of the run, the first of its machine, another."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The data of a run. ``absent`` says of each split that is ``None`` why there is no data in it, and whether
    that was asked for."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    absent: Mapping[str, Absent]

    def by_name(self) -> dict[str, Dataset | None]:
        """train, valid and test."""
        return {name: getattr(self, name) for name in SPLIT_NAMES}


def tokenizer_from(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the settings name.

    Raises:
        ConfigError, DamagedInputError: see ``build_tokenizer``; what is damaged is named with its flag.
    """
    try:
        return build_tokenizer(config.choice())
    except DamagedInputError as error:
        raise DamagedInputError(f"{error}; change {' or '.join(config.files())}, or --tokenizer-type") from error


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    sizes: Sequence[int | None],
    turn: Turn,
    meet: Callable[[str | None], str | None],
    use_cache: bool = True,
    trains: bool = True,
) -> Splits:
    """Train, valid and test data; called by every rank with the same arguments but ``turn``.

    Every rank opens and checks the files. The first rank of the run writes the indices into the cache and looks for
    ids outside the vocabulary, which reads a data set whole when it is new. Then the first rank of each machine does,
    where the cache does not have them: the folders may be on a disk of each machine. Then the others map the indices.
    After each of the four all ranks meet: ``meet(wrong)`` is given what is wrong here, or ``None``, and returns on
    every rank what is wrong on the first that has anything, with its number, so that all stop for what one has found.

    Args:
        tokenizer: bounds the ids and names eod and pad; without one ids are not checked and no loss is masked.
        sizes: samples asked of train, valid and test; ``None`` for one epoch, 0 for none. See ``requested_sizes``.
        use_cache: off, indices are made in memory by every rank, no file is written, and ids are only checked in the
            samples that are read.
        trains: off, there need be no training data.

    Raises:
        ConfigError: no data for a split that was asked for (an empty test split is only reported in ``absent``), a
            cache folder that cannot be written, or settings that contradict each other.
        DamagedInputError: a data file is missing or damaged or holds ids outside the vocabulary, or another rank has
            failed.
    """
    failure: ConfigError | DamagedInputError | OSError | None = None
    try:
        plans = _plan(config, tokenizer, sequence_length=sequence_length, sizes=sizes, trains=trains)
        maker = _Maker(config, plans.sources, tokenizer, sequence_length, seed, use_cache=use_cache)
        for entry in maker.entries(plans.present):
            entry.require_usable_folder()
    except (ConfigError, DamagedInputError, OSError) as error:
        failure = error
    _stop_together(failure, meet)
    built: dict[str, Dataset] = {}
    for builder in ("run", "machine", "others"):
        if turn == builder:
            try:
                built = maker.build_all(plans.present, build_here=turn != "others")
            except (ConfigError, DamagedInputError, OSError) as error:
                failure = error
        _stop_together(failure, meet)
    return Splits(**{name: built.get(name) for name in SPLIT_NAMES}, absent=plans.absent)


def _stop_together(
    failure: ConfigError | DamagedInputError | OSError | None, meet: Callable[[str | None], str | None]
) -> None:
    """Raise where any rank has failed: its own failure on a rank that has one, else the words of another."""
    wrong = meet(None if failure is None else str(failure))
    if isinstance(failure, OSError):
        raise DamagedInputError(str(failure)) from failure
    if wrong is not None:
        raise failure or DamagedInputError(f"stopped at the data, as another rank did: {wrong}")


def data_digest(splits: Splits) -> str:
    """SHA-256, in hex, of what decides the samples of a run and their order, without a path in it.

    It covers the indices of every split, each data set's ``content_digest`` and the ids of end of document and padding.
    """
    content = {name: None if data is None else _facts(data) for name, data in splits.by_name().items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def source_digests(splits: Splits) -> list[tuple[str, str]]:
    """Name and ``content_digest`` of every data set behind the splits, in order."""
    found: list[tuple[str, str]] = []
    for data in splits.by_name().values():
        members = data.members if isinstance(data, BlendedDataset) else [data] * (data is not None)
        found += [(member.source.name, member.source.content_digest()) for member in members]
    return found


def _facts(data: Dataset) -> dict[str, Any]:
    if isinstance(data, BlendedDataset):
        return {"indices": dict(data.index_digests), "members": [_facts(member) for member in data.members]}
    rules = data.rules
    return {
        "indices": dict(data.index_digests),
        "content": data.source.content_digest(),
        "rules": [rules.sequence_length, rules.vocab_size, rules.eod, rules.pad, rules.eod_mask_loss],
    }


@dataclass(frozen=True, kw_only=True)
class _Plans:
    sources: DataSources
    present: Mapping[str, SplitPlan]
    absent: Mapping[str, Absent]


def _plan(
    config: DataConfig, tokenizer: Tokenizer | None, *, sequence_length: int, sizes: Sequence[int | None], trains: bool
) -> _Plans:
    problems = config.problems()
    if problems:
        raise ConfigError(problems)
    sources = data_sources(config)
    opened = _open(config, tokenizer, sources)
    present: dict[str, SplitPlan] = {}
    absent: dict[str, Absent] = {}
    for i, name in enumerate(SPLIT_NAMES):
        blend, bookends = sources.blends[i], sources.bookends[i]
        plan: SplitPlan | Absent
        if blend is None or bookends is None:
            plan = Absent(reason=f"left out by {sources.flags[i]}", chosen=True)
        else:
            plan = plan_split(
                [opened[prefix] for prefix in blend.prefixes],
                blend.weights,
                bookends=bookends,
                size=sizes[i],
                sequence_length=sequence_length,
                surplus=config.mid_level_dataset_surplus,
            )
        if isinstance(plan, SplitPlan):
            present[name] = plan
            continue
        absent[name] = plan
        if sizes[i] and ((name == "train" and trains) or (name == "valid" and not plan.chosen)):
            cut = config.given_sources() if sources.matrix is not None else []
            change = " or ".join(dict.fromkeys([sources.flags[i], *cut]))
            problems.append(Problem(f"no {name} data ({plan.reason})", f"data for {sizes[i]} samples", change))
    if problems:
        raise ConfigError(problems)
    return _Plans(sources=sources, present=present, absent=absent)


def _open(config: DataConfig, tokenizer: Tokenizer | None, sources: DataSources) -> dict[str, TokenSource]:
    if not config.mock_data:
        with naming_source(config):
            return {prefix: IndexedDataset(prefix, mmap_bin=config.mmap_bin_files) for prefix in sources.prefixes}
    if tokenizer is None:
        raise ConfigError([Problem("mock data without a tokenizer", "the size of the vocabulary", "--tokenizer-type")])
    return {"": MockDocuments(tokenizer.vocab_size, tokenizer.eod)}


class _Maker:
    """Turns plans into data sets, through the cache."""

    def __init__(
        self,
        config: DataConfig,
        sources: DataSources,
        tokenizer: Tokenizer | None,
        sequence_length: int,
        seed: int,
        *,
        use_cache: bool,
    ) -> None:
        self._config, self._sources, self._seed, self._use_cache = config, sources, seed, use_cache
        self._tokenizer = None if tokenizer is None else tokenizer.identifiers()
        self._rules = SampleRules(
            sequence_length=sequence_length,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            eod=-1 if tokenizer is None else tokenizer.eod,
            pad=NO_PAD if tokenizer is None else loss_pad_id(tokenizer, config.allow_ambiguous_pad_tokens),
            eod_mask_loss=config.eod_mask_loss,
        )

    def entries(self, plans: Mapping[str, SplitPlan]) -> list[CacheEntry]:
        """The cache entries of all plans; none where nothing is cached."""
        found = [self._member_entry(name, member) for name, plan in plans.items() for member in plan.members]
        found += [self._blend_entry(name, plan) for name, plan in plans.items() if plan.weights is not None]
        return [entry for entry in found if entry is not None]

    def build_all(self, plans: Mapping[str, SplitPlan], *, build_here: bool) -> dict[str, Dataset]:
        """Members, by several threads, then blends of them, by split name. A rank that builds checks the ids first."""
        jobs = [(name, member) for name, plan in plans.items() for member in plan.members]
        with ThreadPoolExecutor(max_workers=self._config.num_dataset_builder_threads) as pool:
            if build_here and self._use_cache:
                sources = {member.source.name: member.source for _, member in jobs}
                list(pool.map(self._require_ids, sources.values()))
            members = iter(list(pool.map(lambda job: self._member(*job, build_here=build_here), jobs)))
        return {
            name: self._split(name, plan, [next(members) for _ in plan.members], build_here)
            for name, plan in plans.items()
        }

    def _require_ids(self, source: TokenSource) -> None:
        vocab_size = self._rules.vocab_size
        if vocab_size is None or not isinstance(source, IndexedDataset):
            return
        key, description = cache_key({"class": "TokenRange", "dataset_path": source.path})
        cache = CacheEntry(
            folder=self._folder(source),
            stem=f"{key}-TokenRange",
            description=description,
            content=source.file_digest(),
            names=RANGE_NAMES,
        )
        flags = " or ".join(self._config.given_sources())
        tokenizer = "--tokenizer-type, --tokenizer-model or --vocab-size to what the data was made with"
        require_ids_within(source, vocab_size, cache, f"change {flags}, or {tokenizer}")

    def _folder(self, source: TokenSource) -> Path:
        """Where the cache of a data set that lies in files is."""
        return Path(self._config.data_cache_path or f"{source.path}/cache/GPTDataset_indices")

    def _member(self, name: str, plan: MemberPlan, *, build_here: bool) -> GPTDataset:
        def build() -> Mapping[str, NDArray]:
            sequences = np.arange(plan.first, plan.stop, dtype=np.int32)
            return build_indices(sequences, plan.source.sequence_lengths, plan.samples, self._seed).arrays()

        indices = _through_cache(self._member_entry(name, plan), build, build_here)
        return GPTDataset(plan.source, indices, self._rules)

    def _split(self, name: str, plan: SplitPlan, members: list[GPTDataset], build_here: bool) -> Dataset:
        weights, size = plan.weights, plan.size
        if weights is None:
            return members[0]

        def build() -> Mapping[str, NDArray]:
            if size is None:
                return build_exhaustive_indices([len(member) for member in members])
            return build_blend_indices(weights, size)

        return BlendedDataset(members, _through_cache(self._blend_entry(name, plan), build, build_here))

    def _identity(self, name: str, plan: MemberPlan) -> dict[str, Any]:
        """Megatron's fields in Megatron's order: their text names the cached files."""
        return {
            "class": "MockGPTDataset" if plan.source.path is None else "GPTDataset",
            "dataset_path": plan.source.path,
            "num_samples": plan.request,
            "index_split": name,
            "random_seed": self._seed,
            "sequence_length": self._rules.sequence_length,
            "split": self._sources.split,
            "split_matrix": self._sources.matrix,
            "tokenizer": self._tokenizer,
        }

    def _member_entry(self, name: str, plan: MemberPlan) -> CacheEntry | None:
        if not self._use_cache or (self._config.data_cache_path is None and plan.source.path is None):
            return None
        identity = self._identity(name, plan)
        key, description = cache_key(identity)
        return CacheEntry(
            folder=self._folder(plan.source),
            stem=f"{key}-{identity['class']}-{name}",
            description=description,
            content=plan.source.content_digest(),
            names=INDEX_NAMES,
        )

    def _blend_entry(self, name: str, plan: SplitPlan) -> CacheEntry | None:
        folder = self._config.data_cache_path
        if folder is None or not self._use_cache or plan.weights is None:
            return None
        identity = {
            "class": "BlendedDataset",
            "datasets": [self._identity(name, member) for member in plan.members],
            "split": name,
            "weights": list(plan.weights),
            "size": plan.size,
        }
        key, description = cache_key(identity)
        contents = "\n".join(member.source.content_digest() for member in plan.members)
        return CacheEntry(
            folder=Path(folder),
            stem=f"{key}-BlendedDataset-{name}",
            description=description,
            content=hashlib.sha256(contents.encode()).hexdigest(),
            names=BLEND_NAMES,
        )


def _through_cache(
    entry: CacheEntry | None, build: Callable[[], Mapping[str, NDArray]], build_here: bool
) -> CachedArrays:
    if entry is None:
        return digested(build())
    if build_here:
        return entry.load_or_build(build)
    found = entry.load()
    if found is None:
        raise DamagedInputError(
            f"{entry.path('checksums.json')}: the first rank of this machine wrote no such indices, or not where this "
            "rank looks; --data-cache-path must name a folder that all ranks of a machine see"
        )
    return found
