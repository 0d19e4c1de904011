"""What a gate is: a check, where it applies, where it does not and why, and a breach it has to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.architecture.sources import Source, parse

# Line and what is wrong there, with the way out.
Hit = tuple[int, str]

LIBRARY = ("megatron/", "tools/", "pretrain_hybrid.py")
EVERYWHERE = ("",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One ban or limit.

    ``where`` and the keys of ``allowed`` are path prefixes; the value of an allowance is its reason.
    ``planted`` is Python text that breaks the rule, as it would stand in the file ``planted_at``.
    """

    name: str
    check: Callable[[Source], Iterable[Hit]]
    where: tuple[str, ...] = LIBRARY
    allowed: Mapping[str, str] = field(default_factory=dict)
    planted: str
    planted_at: str = "megatron/core/transformer/planted.py"

    def findings(self, sources: Iterable[Source]) -> Iterator[str]:
        """``path:line: what is wrong`` for each breach in the files the rule applies to."""
        for source in sources:
            if source.path.startswith(self.where) and not source.path.startswith(tuple(self.allowed)):
                for line, wrong in self.check(source):
                    yield f"{source.path}:{line}: {wrong}"

    def findings_in_plant(self) -> list[str]:
        """What the rule says of its own planted breach."""
        return list(self.findings([parse(self.planted_at, self.planted)]))
