"""Several data sets as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numpy.typing import NDArray

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.datasets.blend_indices import BLEND_NAMES, draws_by_member
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import CachedArrays

# The member's number is stored in 16 bits.
MAX_MEMBERS = 32766


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Prefixes of token files, and a weight for each; without weights a member counts by its number of samples."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """``p1 p2 ...`` or ``w1 p1 w2 p2 ...``; words without numbers among them have no weights.

    Raises:
        ConfigError: some of the words in the weights' places are numbers and some are not; a number is without its
            prefix; a weight is not above 0; a prefix is empty; or there are too many members.
    """
    weights = [_number(word) for word in words[::2]]
    given = f"{flag} {' '.join(words[:8])}{' ...' if len(words) > 8 else ''}"
    numbers = [word for word in words if _number(word) is not None]
    bare = next((word for word, weight in zip(words[::2], weights, strict=True) if weight is None), None)
    if not numbers or (len(words) % 2 == 0 and all(weight is None for weight in weights)):
        blend = Blend(prefixes=tuple(word.strip() for word in words), weights=None)
    elif bare is not None or len(words) % 2:
        wrong_word = f"{words[-1]!r} is a weight with no prefix behind it"
        if bare is not None:
            wrong_word = f"{bare!r} is a prefix with no weight before it"
        needed = f"a weight before every prefix, or before none; {wrong_word}"
        raise ConfigError([Problem(given, needed, f"{flag}; a file whose name is a number as ./{numbers[0]}")])
    else:
        known = tuple(weight for weight in weights if weight is not None)
        blend = Blend(prefixes=tuple(word.strip() for word in words[1::2]), weights=known)
        pairs = zip(words[::2], known, strict=True)
        wrong = [f"{word} is {weight}" for word, weight in pairs if not 0 < weight < math.inf]
        if not wrong and math.isinf(sum(known)):
            wrong = ["their sum is inf"]
        if wrong:
            raise ConfigError([Problem(given, f"finite weights above 0 with a finite sum; {wrong[0]}", flag)])
    if not all(blend.prefixes):
        raise ConfigError([Problem(f"an empty word behind {flag}", "the prefix of a data set", flag)])
    if len(blend.prefixes) > MAX_MEMBERS:
        raise ConfigError([Problem(f"{len(blend.prefixes)} data sets", f"at most {MAX_MEMBERS}", flag)])
    return blend


def member_request(size: int, weight: float, surplus: float = 0.0) -> int:
    """Samples to index in a member for a blend of ``size``; ``surplus`` is a share on top, in case it is drawn from
    a little more often than its weight says."""
    return math.ceil(math.ceil(size * weight) * (1 + surplus))


def blend_size(size: int, weights: Sequence[float]) -> int:
    """Samples of a weighted blend: at least ``size``, each member's part rounded up."""
    return sum(member_request(size, weight) for weight in weights)


class BlendedDataset:
    """Sample i is sample ``dataset_sample_index[i]`` of member ``dataset_index[i]``.

    Raises:
        ConfigError: a member has fewer samples than are drawn from it.
    """

    def __init__(self, members: Sequence[GPTDataset], indices: CachedArrays) -> None:
        self.members = tuple(members)
        self.dataset_index, self.dataset_sample_index = (indices.arrays[name] for name in BLEND_NAMES)
        self.index_digests: Mapping[str, str] = dict(indices.digests)
        counts = draws_by_member(self.dataset_index, len(members))
        problems = [
            Problem(
                f"a blend that draws {count} samples from {member.source.name}",
                f"at most the {len(member)} that were indexed there",
                "a larger --mid-level-dataset-surplus",
            )
            for member, count in zip(self.members, counts.tolist(), strict=True)
            if count > len(member)
        ]
        if problems:
            raise ConfigError(problems)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """As the member's; see ``GPTDataset``."""
        member, local = self._located(index)
        return member[local]

    def raw(self, index: int) -> NDArray:
        """As the member's; see ``GPTDataset``."""
        member, local = self._located(index)
        return member.raw(local)

    def _located(self, index: int) -> tuple[GPTDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in a blend")
        return self.members[int(self.dataset_index[index])], int(self.dataset_sample_index[index])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
