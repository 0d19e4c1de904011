"""What happens to a Megatron flag that is no setting here: taken without effect, taken with one value, or refused.

The flags themselves are data: ``legacy_table.py``. Each says how many values it takes, so that a command line can be
read past it, and gives a reason in words a user can act on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.errors import Problem

Arity = Literal["0", "1", "+", "*"]
"""Values that follow a flag: none, one, one or more, any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyFlag:
    """One flag of Megatron's that has no field.

    Attributes:
        spelling: as typed; a spelling that ends in ``*`` stands for every flag that starts like it.
        arity: how many values follow it.
        kind: ``ignored``: taken with one warning; ``only``: taken with the values in ``accepted``, silently;
            ``refused``; ``alias``: another spelling of ``target``, or of ``target value`` where ``value`` is set.
        reason: why it has no effect, or why it is refused.
        change: what to do instead, for a refusal.
        unless: spelling and value of a setting with which even an ignored flag is refused.
    """

    spelling: str
    arity: Arity
    kind: Literal["ignored", "only", "refused", "alias"]
    reason: str
    change: str = ""
    accepted: tuple[str, ...] = ()
    target: str = ""
    value: str | None = None
    unless: tuple[str, str] | None = None

    def matches(self, spelling: str) -> bool:
        """True where the entry is about this flag."""
        if self.spelling.endswith("*"):
            return spelling.startswith(self.spelling[:-1])
        return spelling == self.spelling

    def problem(self, spelling: str, values: Sequence[str]) -> Problem | None:
        """Why the flag with these values is refused; ``None`` where it is taken."""
        given = " ".join([spelling, *values])
        if self.kind == "refused":
            needed = f"a run without it: {self.reason}"
            return Problem(given, needed, self.change or f"leave out {spelling}")
        if self.kind == "only" and " ".join(values) not in self.accepted:
            needed = (
                f"{' or '.join(self.accepted)}, the only value{'s' * (len(self.accepted) > 1)} taken: {self.reason}"
            )
            return Problem(given, needed, self.change or f"leave out {spelling}")
        return None

    def note(self, spelling: str) -> str | None:
        """The warning to show where the flag is taken; ``None`` where there is nothing to say."""
        if self.kind == "ignored":
            return f"{spelling} has no effect: {self.reason}"
        if self.kind == "alias" and self.reason:
            return f"{spelling} is deprecated: {self.reason}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagFamily:
    """Flags that share a fate and its reason; spellings are separated by white space.

    ``switches`` take no value, ``values`` one, ``lists`` one or more, ``optional_lists`` any number.
    """

    kind: Literal["ignored", "only", "refused"]
    reason: str
    change: str = ""
    accepted: tuple[str, ...] = ()
    switches: str = ""
    values: str = ""
    lists: str = ""
    optional_lists: str = ""

    def flags(self) -> list[LegacyFlag]:
        """One entry per spelling."""
        by_arity: dict[Arity, str] = {
            "0": self.switches,
            "1": self.values,
            "+": self.lists,
            "*": self.optional_lists,
        }
        return [
            LegacyFlag(
                spelling=spelling,
                arity=arity,
                kind=self.kind,
                reason=self.reason,
                change=self.change,
                accepted=self.accepted,
            )
            for arity, spellings in by_arity.items()
            for spelling in spellings.split()
        ]


class LegacyTable:
    """All legacy flags, looked up by spelling."""

    def __init__(self, families: Sequence[FlagFamily], single: Sequence[LegacyFlag]) -> None:
        every = [*single, *(flag for family in families for flag in family.flags())]
        self.entries: tuple[LegacyFlag, ...] = tuple(every)
        self._exact = {flag.spelling: flag for flag in every if not flag.spelling.endswith("*")}
        self._prefixes = [flag for flag in every if flag.spelling.endswith("*")]
        twice = [spelling for spelling, count in Counter(flag.spelling for flag in every).items() if count > 1]
        if twice:
            raise ValueError(f"legacy flags listed twice: {', '.join(twice)}")

    @property
    def usable_spellings(self) -> tuple[str, ...]:
        """Every spelling that is written out and taken, for nearest names."""
        return tuple(spelling for spelling, flag in self._exact.items() if flag.kind != "refused")

    def find(self, spelling: str) -> LegacyFlag | None:
        """The entry about a flag, or ``None``."""
        if spelling in self._exact:
            return self._exact[spelling]
        return next((flag for flag in self._prefixes if flag.matches(spelling)), None)
