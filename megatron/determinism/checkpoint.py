"""``checkpoint verify DIR`` and ``checkpoint diff A B``: is a checkpoint whole, and do two hold the same.

A program of its own, ``python -m megatron.determinism.checkpoint``: reading tensors needs torch.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import Difference, first_difference
from megatron.core.dist_checkpointing.digest_process import DigesterLostError
from megatron.core.dist_checkpointing.facts import FACTS_FILE, DamagedFactsError
from megatron.core.dist_checkpointing.flat_tensor import TensorFacts
from megatron.core.dist_checkpointing.integrity import problems_of
from megatron.core.dist_checkpointing.progress import SlowProgress
from megatron.core.dist_checkpointing.stored import AT_ONCE_BYTES, THREADS, StoredCheckpoint, in_order, lots
from megatron.determinism.command_line import build_parser
from megatron.determinism.report import Exit, Outcome

_SHOWN = 20
GENERATORS = "generators."
PROGRESS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "step_count", "schedule_position")
"""Facts that are part of the state besides the schedule, which follows them."""


def verify_checkpoint(folder: Path) -> Outcome:
    """Whether every file has the bytes that were written, and every tensor the digest it was saved with."""
    try:
        stored = StoredCheckpoint(folder)
    except DamagedFactsError as error:
        return Outcome(
            exit=Exit.DIFFERENT,
            verdict=f"damaged: {error}",
            details=("  what the other files should hold is not known without it",),
            facts={"checkpoint": str(folder), "damaged_files": [FACTS_FILE], "damaged_tensors": []},
        )
    except DamagedInputError as error:
        return _no_checkpoint(error)
    size = sum(file["bytes"] for file in stored.facts["files"].values())
    try:
        problems, tensors = problems_of(stored, SlowProgress(f"verifying {stored.folder}", size, out=sys.stderr))
    except DigesterLostError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"not verified: {error}", facts={"checkpoint": str(folder)})
    facts = {
        "checkpoint": str(stored.folder),
        "damaged_files": sorted(problems),
        "damaged_tensors": list(tensors),
    }
    files, count = len(stored.facts["files"]), len(stored.facts["tensors"])
    if not problems and not tensors:
        return Outcome(
            exit=Exit.SAME, verdict=f"whole: {files} files and {count} tensors in {stored.folder}", facts=facts
        )
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"damaged: {len(problems)} of {files} files, {len(tensors)} of {count} tensors in {stored.folder}",
        details=tuple(f"  {text}" for text in _shortened([*problems.values(), *_by_reason(tensors)])),
        facts=facts,
    )


def _by_reason(tensors: Mapping[str, str]) -> list[str]:
    """A line for each thing that is wrong, with the tensors it is wrong with: one file may take all of them along."""
    keys: dict[str, list[str]] = {}
    for key, reason in tensors.items():
        keys.setdefault(reason, []).append(key)
    return [f"{', '.join(of[:3])}{_and_more(len(of) - 3)}: {reason}" for reason, of in keys.items()]


def _and_more(count: int) -> str:
    return f" and {count} more tensor{'s' * (count != 1)}" if count > 0 else ""


def _no_checkpoint(error: DamagedInputError) -> Outcome:
    return Outcome(exit=Exit.DAMAGED, verdict=f"not a checkpoint: {error}")


def _shortened(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def diff_checkpoints(left: Path, right: Path) -> Outcome:
    """Whether two checkpoints hold the same state, bit for bit, whatever layouts wrote them.

    Compared are all tensors and how far the run has come. Generators belong to ranks, so they are compared where the
    ranks are laid out alike.
    """
    try:
        a, b = StoredCheckpoint(left), StoredCheckpoint(right)
        another = _other_model(a, b)
        if another:
            return Outcome(
                exit=Exit.NOT_COMPARABLE,
                verdict=f"different models: {len(another)} tensors do not correspond (A = {a.folder}, B = {b.folder})",
                details=tuple(f"  {line}" for line in _shortened(another)),
                facts={"different_models": another},
            )
        return _diff(a, b)
    except DamagedInputError as error:
        return _no_checkpoint(error)


def _is_weight(key: str) -> bool:
    return key.startswith(("main_params.", "expert_bias."))


def _other_model(a: StoredCheckpoint, b: StoredCheckpoint) -> list[str]:
    """Weights that only one of them has, or that have another shape, type or cut."""
    wrong = []
    for key in dict.fromkeys([*a.facts["tensors"], *b.facts["tensors"]]):
        there = [key in c.facts["tensors"] for c in (a, b)]
        if all(there) and not key.startswith(GENERATORS) and a.tensor(key) != b.tensor(key):
            one, other = a.tensor(key), b.tensor(key)
            wrong.append(
                f"{key}: {one.dtype}{list(one.shape)} in {one.shards} shards in A, "
                f"{other.dtype}{list(other.shape)} in {other.shards} in B"
            )
        elif not all(there) and _is_weight(key):
            wrong.append(f"{key}: only in {'A' if there[0] else 'B'}")
    return wrong


def _diff(a: StoredCheckpoint, b: StoredCheckpoint) -> Outcome:
    same_ranks = a.facts["physical_layout"] == b.facts["physical_layout"]
    keys = [
        key
        for key in dict.fromkeys([*a.facts["tensors"], *b.facts["tensors"]])
        if same_ranks or not key.startswith(GENERATORS)
    ]
    found: dict[str, str] = {}
    for name in (*PROGRESS, "schedule"):
        if a.facts.get(name) != b.facts.get(name):
            found[name] = f"{a.facts.get(name)} in A, {b.facts.get(name)} in B"
    found |= _tensor_differences(a, b, keys)
    facts: dict[str, Any] = {
        "a": str(a.folder),
        "b": str(b.folder),
        "compared_tensors": len(keys),
        "differences": found,
    }
    notes = [] if same_ranks else ["  generators are not compared: the ranks are laid out in different ways"]
    for name in ("logical_layout", "physical_layout"):
        if a.facts[name] != b.facts[name]:
            notes.append(f"  {name}: {a.facts[name]} in A, {b.facts[name]} in B")
    if not found:
        verdict = f"same content: {len(keys)} tensors and the position of the run, bit for bit"
        return Outcome(exit=Exit.SAME, verdict=verdict, details=tuple(notes), facts=facts)
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"different: {', '.join(list(found)[:3])}{' ...' if len(found) > 3 else ''}",
        details=(*(f"  {line}" for line in _shortened([f"{k}: {text}" for k, text in found.items()])), *notes),
        facts=facts,
    )


def _tensor_differences(a: StoredCheckpoint, b: StoredCheckpoint, keys: Sequence[str]) -> dict[str, str]:
    """How which tensors differ, in the order of the keys.

    Raises:
        DamagedInputError: a tensor cannot be read; the first one of the order.
    """
    found: dict[str, str] = {}
    for key in keys:
        there = [key in c.facts["tensors"] for c in (a, b)]
        if not all(there):
            found[key] = f"only in {'A' if there[0] else 'B'}"
        elif (left := a.tensor(key)) != (right := b.tensor(key)):
            sides = [f"{of.torch_dtype}[{of.numel}] in {side}" for side, of in (("A", left), ("B", right))]
            found[key] = ", ".join(sides)
    found |= _Comparison(a, b).differences([key for key in keys if key not in found])
    return {key: found[key] for key in keys if key in found}


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes ``at ... at + count`` of a tensor: why they cannot be read in A and in B, and how they differ."""

    key: str
    at: int
    count: int
    errors: tuple[str | None, ...] = ()
    difference: Difference | None = None


class _Comparison:
    """Of the tensors of two checkpoints, by as many threads as there are cores; each holds ``AT_ONCE_BYTES`` of both
    sides."""

    def __init__(self, a: StoredCheckpoint, b: StoredCheckpoint) -> None:
        self._sides = (a, b)
        self._own = threading.local()

    def differences(self, keys: Sequence[str]) -> dict[str, str]:
        """How which of these tensors differ; both sides know them by the same facts."""
        a, b = self._sides
        total = sum(a.tensor(key).nbytes for key in keys)
        progress = SlowProgress(f"comparing {a.folder} with {b.folder}", total, out=sys.stderr)
        parts = (_Part(key, *lot) for key in keys for lot in lots(a.tensor(key).nbytes))

        def compared(part: _Part) -> _Part:
            done = self._compare(part)
            progress.add(part.count)
            return done

        found: dict[str, str] = {}
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-diff")
        try:
            for key, of_key in itertools.groupby(in_order(pool, compared, parts), key=lambda part: part.key):
                words = _difference_of(a.tensor(key), list(of_key))
                if words is not None:
                    found[key] = words
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    def _compare(self, part: _Part) -> _Part:
        dtype, buffers = self._sides[0].tensor(part.key).torch_dtype, self._buffers()
        values = [buffer[: part.count].view(dtype) for buffer in buffers]
        errors = tuple(
            _why_unread(stored, part.key, out, part.at // dtype.itemsize)
            for stored, out in zip(self._sides, values, strict=True)
        )
        if any(errors):
            return replace(part, errors=errors)
        # Eight bytes at once, by NumPy: nearly as fast as they are read.
        for buffer in buffers:
            buffer[part.count :][:8].zero_()
        left, right = (buffer[: -(-part.count // 8) * 8].view(torch.int64).numpy() for buffer in buffers)
        return part if numpy.array_equal(left, right) else replace(part, difference=first_difference(*values))

    def _buffers(self) -> tuple[torch.Tensor, ...]:
        """This thread's."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = tuple(torch.empty(AT_ONCE_BYTES, dtype=torch.uint8) for _ in self._sides)
        return self._own.buffers


def _why_unread(stored: StoredCheckpoint, key: str, out: torch.Tensor, start: int) -> str | None:
    try:
        stored.read(key, out, start)
    except DamagedInputError as error:
        return str(error)
    return None


def _difference_of(facts: TensorFacts, parts: Sequence[_Part]) -> str | None:
    """What the parts of one tensor say together.

    Raises:
        DamagedInputError: a part cannot be read; in A before one in B.
    """
    for errors in zip(*(part.errors for part in parts if part.errors), strict=True):
        for error in filter(None, errors):
            raise DamagedInputError(error)
    unequal = [(part.at // facts.torch_dtype.itemsize, part.difference) for part in parts if part.difference]
    if not unequal:
        return None
    begin, first = unequal[0]
    shard, index = divmod(begin + first.index[0], facts.shard_numel)
    return (
        f"{sum(found.count for _, found in unequal)} of {facts.numel} elements; first {index} of shard {shard}: "
        f"{_shown(first.left)} in A, {_shown(first.right)} in B"
    )


def _shown(value: float) -> str:
    return f"{value.hex()} ({value!r})" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    """Run ``checkpoint verify`` or ``checkpoint diff``; returns the exit code."""
    options = build_parser().parse_args(["checkpoint", *argv])
    if options.action == "verify":
        outcome = verify_checkpoint(options.folder)
    else:
        outcome = diff_checkpoints(options.a, options.b)
    return outcome.print(sys.stdout, as_json=options.json)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        # Whoever started it is interrupted too, and says so.
        sys.exit(128 + signal.SIGINT)
