"""From the command line to ``RunConfig``: flags are made from the dataclasses' fields, never written by hand.

Megatron's conventions: bare switches, ``--no-x`` and ``--disable-x`` for a switch that is on by default, several values
for a tuple, no abbreviations, the last of repeated flags counts. ``--no-x`` also takes back a bare switch ``--x`` that
stands before it, for instance in a script that adds flags behind its own. Nothing here loads torch.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.config.fields import Flag, flags_of
from megatron.core.config.numbers import real_number, shortened, whole_number
from megatron.training.cli.explain import missing_value, stray_values, surplus_values, unknown_flag, value_shape
from megatron.training.config.legacy import LegacyFlag
from megatron.training.config.legacy_table import MEGATRON_FLAGS
from megatron.training.config.legacy_values import reason_against
from megatron.training.config.run import RunConfig, config_classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A command line, read to its end whatever was wrong on the way.

    Attributes:
        config: the settings; a flag with a bad value keeps its default.
        named: (group of ``RunConfig``, field) of every setting that was given, also at what it is by default; one that
            ``--no-x`` took back was not.
        problems: everything wrong with the words of the command line.
        doubtful: spellings of flags whose value is not known because of those problems; rules about them would only
            repeat the complaint.
        notes: warnings about flags taken without effect, one each.
    """

    config: RunConfig
    named: frozenset[tuple[str, str]]
    problems: tuple[Problem, ...]
    doubtful: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Word:
    """One flag as typed and the values up to the next flag; ``attached`` is what stood behind ``=``."""

    spelling: str
    attached: str | None
    values: list[str]


def our_flags() -> dict[str, tuple[str, Flag]]:
    """Every flag made from a field: spelling -> (group of ``RunConfig``, flag)."""
    return {
        spelling: (group, flag)
        for group, cls in config_classes().items()
        for flag in flags_of(cls)
        for spelling in flag.spellings
    }


def parse(argv: Sequence[str]) -> Parsed:
    """Read a command line. Never raises for what a user typed: see ``Parsed.problems``."""
    reading = _Reading(our_flags())
    for word in _words(argv, reading.problems):
        reading.take(word)
    reading.check_conflicts()
    groups = {
        group: cls(**{name: value for (owner, name), value in reading.values.items() if owner == group})
        for group, cls in config_classes().items()
    }
    return Parsed(
        config=RunConfig(**groups),
        named=frozenset(reading.values.keys() - reading.taken_back),
        problems=tuple(reading.problems),
        doubtful=frozenset(reading.doubtful),
        notes=tuple(dict.fromkeys(reading.notes)),
    )


def parse_run_config(argv: Sequence[str]) -> RunConfig:
    """The settings of a command line as given, before ``resolve`` and ``validate``.

    Raises:
        ConfigError: every problem with the flags and their values at once.
    """
    parsed = parse(argv)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config


def _words(argv: Sequence[str], problems: list[Problem]) -> Iterator[_Word]:
    current: _Word | None = None
    strays: list[str] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            if current is not None:
                yield current
            spelling, equals, attached = token.partition("=")
            current = _Word(spelling, attached if equals else None, [])
        elif current is None:
            strays.append(token)
        else:
            current.values.append(token)
    if strays:
        problems.append(stray_values(strays))
    if current is not None:
        yield current


@dataclass(slots=True)
class _Reading:
    """What has been read so far."""

    flags: dict[str, tuple[str, Flag]]
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    taken_back: set[tuple[str, str]] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    seen: dict[str, list[str]] = field(default_factory=dict)
    legacy: list[tuple[LegacyFlag, str]] = field(default_factory=list)

    def take(self, word: _Word) -> None:
        """Read one flag with its values."""
        self.seen[word.spelling] = self._texts(word)
        if word.spelling in self.flags:
            self._take_ours(word, word.spelling)
        elif (legacy := MEGATRON_FLAGS.find(word.spelling)) is not None:
            self._take_legacy(word, legacy)
        elif (switch := self._taken_back(word.spelling)) is not None:
            self._take_ours(word, switch, back=True)
        else:
            known = (*self.flags, *MEGATRON_FLAGS.usable_spellings)
            problem, names = unknown_flag(word.spelling, self._texts(word), known)
            self.problems.append(problem)
            self.doubtful.update(names)

    def _taken_back(self, spelling: str) -> str | None:
        """The bare switch that ``--no-x`` takes back; ``None`` where it is no such thing."""
        switch = "--" + spelling.removeprefix("--no-")
        flag = self.flags[switch][1] if spelling.startswith("--no-") and switch in self.flags else None
        return switch if flag is not None and flag.is_switch and not flag.negates else None

    def _take_ours(self, word: _Word, spelling: str, *, back: bool = False) -> None:
        group, flag = self.flags[spelling]
        before = len(self.problems)
        if flag.is_switch:
            self._expect(word, "0", "no value")
            value: Any = not (flag.negates or back)
        elif flag.repeated:
            texts = self._expect(word, "+", value_shape(flag))
            value = tuple(self._convert(flag, word.spelling, text) for text in texts)
        else:
            texts = self._expect(word, "1", value_shape(flag))
            value = self._convert(flag, word.spelling, texts[0]) if texts else None
        if len(self.problems) > before:
            self.doubtful.update(flag.spellings)
        else:
            self.values[group, flag.name] = value
            (self.taken_back.add if back else self.taken_back.discard)((group, flag.name))

    def _take_legacy(self, word: _Word, legacy: LegacyFlag) -> None:
        if legacy.kind == "alias" and legacy.value is None:
            self._take_ours(word, legacy.target)
        elif legacy.kind == "alias":
            self._expect(word, "0", "no value")
            target = self.flags[legacy.target][1]
            self.values[self.flags[legacy.target][0], target.name] = legacy.value
        elif legacy.kind != "refused":  # a refused flag may have any values: one complaint is enough
            before = len(self.problems)
            self._expect(word, legacy.arity, "a value")
            if len(self.problems) > before:
                return
        problem = legacy.problem(word.spelling, self._texts(word))
        if problem is not None:
            self.problems.append(problem)
            return
        self.legacy.append((legacy, word.spelling))
        note = legacy.note(word.spelling)
        if note is not None:
            self.notes.append(note)

    @staticmethod
    def _texts(word: _Word) -> list[str]:
        return word.values if word.attached is None else [word.attached, *word.values]

    def _expect(self, word: _Word, arity: str, shape: str) -> list[str]:
        """The values of a flag; too few or too many are problems."""
        texts = self._texts(word)
        limit = {"0": 0, "1": 1}.get(arity, len(texts))
        if not texts and arity in ("1", "+"):
            self.problems.append(missing_value(word.spelling, shape))
        takes = "no value" if limit == 0 else "one value"
        if texts[limit:]:
            self.problems.append(surplus_values(word.spelling, texts[limit:], takes))
        return texts[:limit]

    def _convert(self, flag: Flag, spelling: str, text: str) -> Any:
        """The value of a text; a problem and ``None`` where it is not one."""
        if typing.get_origin(flag.inner) is typing.Literal:
            named = {str(choice): choice for choice in typing.get_args(flag.inner)}
            if text in named:
                return named[text]
        elif flag.inner is str:
            return text
        else:
            number = whole_number(text) if flag.inner is int else real_number(text)
            if number is not None:
                return number
        reason = reason_against(flag.spellings, text)
        needed = value_shape(flag) if reason is None else f"{value_shape(flag)}; {reason}"
        self.problems.append(Problem(f"{spelling} {shortened(text)}", needed, spelling))
        return None

    def check_conflicts(self) -> None:
        """Aliases beside the flag they stand for, and flags that one setting rules out."""
        for legacy, spelling in self.legacy:
            if legacy.kind == "alias" and self.seen.get(legacy.target, [legacy.value]) != [legacy.value]:
                both = f"{spelling} and {legacy.target}"
                self.problems.append(Problem(both, "one of the two", f"leave out {spelling}"))
            if legacy.unless is not None:
                other, forbidden = legacy.unless
                group, flag = self.flags[other]
                if self.values.get((group, flag.name), flag.default) == forbidden:
                    given = f"{spelling} with {other} {forbidden}"
                    self.problems.append(Problem(given, f"another {other}", f"{other} none or rope"))
