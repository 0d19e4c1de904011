"""``checkpoint verify DIR`` and ``checkpoint diff A B``: is a checkpoint whole, and do two hold the same.

A program of its own, ``python -m megatron.determinism.checkpoint``: reading tensors needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import DamagedInputError
from megatron.core.digest.bits import first_difference
from megatron.core.dist_checkpointing.facts import FACTS_FILE, DamagedFactsError
from megatron.core.dist_checkpointing.stored import StoredCheckpoint
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
    problems = stored.file_problems()
    tensors: dict[str, str] = {}
    for key, stated in stored.facts["tensors"].items():
        try:
            if stored.digest(key) != stated["digest"]:
                tensors[key] = "not the values that were saved"
        except DamagedInputError as error:
            tensors[key] = str(error)
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
    for key in keys:
        difference = _tensor_difference(a, b, key)
        if difference is not None:
            found[key] = difference
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


def _tensor_difference(a: StoredCheckpoint, b: StoredCheckpoint, key: str) -> str | None:
    """How a tensor differs; ``None`` where its bits agree."""
    there = [key in c.facts["tensors"] for c in (a, b)]
    if not all(there):
        return f"only in {'A' if there[0] else 'B'}"
    left, right = a.values(key), b.values(key)
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype}{list(left.shape)} in A, {right.dtype}{list(right.shape)} in B"
    difference = first_difference(left, right)
    if difference is None:
        return None
    shard, index = divmod(difference.index[0], a.tensor(key).shard_numel)
    one, other = (_shown(values, difference.index[0]) for values in (left, right))
    return (
        f"{difference.count} of {difference.numel} elements; first {index} of shard {shard}: {one} in A, {other} in B"
    )


def _shown(values: torch.Tensor, index: int) -> str:
    value = values[index].item()
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
    sys.exit(main(sys.argv[1:]))
