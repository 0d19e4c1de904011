"""How a command of ``megatron-determinism`` ends: an exit code, text for people or one JSON object."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from megatron.training.setup.closed_pipe import Outlasting


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    SAME = 0
    DIFFERENT = 1
    NOT_COMPARABLE = 2
    DAMAGED = 3


_COLOURS = {Exit.SAME: 32, Exit.DIFFERENT: 31, Exit.NOT_COMPARABLE: 33, Exit.DAMAGED: 35}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a command found.

    ``verdict`` is one line, ``details`` follow it, then what to do next; ``facts`` are the same for programs.
    """

    exit: Exit
    verdict: str
    details: tuple[str, ...] = ()
    next_action: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def print(self, out: TextIO | None, *, as_json: bool) -> int:
        """Print to ``out`` (coloured on a terminal; ``None``: nowhere) and return the exit code, also where nobody
        reads to the end; that of damage where ``out`` cannot be written."""
        if out is None:
            return int(self.exit)
        stream = out if isinstance(out, Outlasting) else Outlasting(out)
        print(self._text(coloured=out.isatty(), as_json=as_json), file=stream, flush=True)
        try:
            stream.require_written()
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return int(Exit.DAMAGED)
        return int(self.exit)

    def _text(self, *, coloured: bool, as_json: bool) -> str:
        if as_json:
            body = {"verdict": self.exit.name.lower(), "exit_code": int(self.exit), "message": self.verdict}
            return json.dumps({**body, **self.facts, **({"next_action": self.next_action} if self.next_action else {})})
        verdict = f"\033[1;{_COLOURS[self.exit]}m{self.verdict}\033[0m" if coloured else self.verdict
        return "\n".join([verdict, *self.details, *([f"  next: {self.next_action}"] if self.next_action else [])])
