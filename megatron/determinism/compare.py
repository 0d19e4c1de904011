"""Compare two fingerprint folders, iteration by iteration and bit by bit. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError
from megatron.determinism.report import Exit, Outcome
from megatron.training.config.manifest import differences, flag_of, launch_differences, read_manifest, shown_value
from megatron.training.observe.fingerprint import COUNTS, FINGERPRINT_FILE, Line, differing_fields, read_lines


def compare(left: Path, right: Path, *, force: bool = False) -> Outcome:
    """Whether two runs had the same bits on every iteration that both folders have.

    With ``force`` runs whose fixed inputs differ are compared all the same.
    """
    try:
        manifests = [_manifest(folder) for folder in (left, right)]
        inputs = as_settings(differences(*(manifest["trajectory"] for manifest in manifests)))
        if inputs and not force:
            return _not_comparable(inputs, {left: "A", right: "B"})
        lines = read_lines(left / FINGERPRINT_FILE), read_lines(right / FINGERPRINT_FILE)
    except DamagedInputError as error:
        return Outcome(exit=Exit.DAMAGED, verdict=f"damaged or missing: {error}")
    common = sorted(lines[0].keys() & lines[1].keys())
    if not common:
        return _nothing_in_common((left, right), lines)
    facts: dict[str, Any] = {
        "a": str(left),
        "b": str(right),
        "common_iterations": len(common),
        "first_iteration": common[0],
        "last_iteration": common[-1],
        "differing_inputs": inputs,
        "differing_settings": as_settings(launch_differences(*(manifest["launches"] for manifest in manifests))),
    }
    notes = [f"compared although {_fixed_inputs_differ(inputs)} (--force)"] if inputs else []
    for iteration in common:
        fields = differing_fields(lines[0][iteration], lines[1][iteration])
        if fields:
            return _different(iteration, fields, facts, notes)
    return _identical(lines[0], lines[1], common, facts, notes)


def _nothing_in_common(folders: tuple[Path, Path], lines: tuple[Mapping[int, Line], Mapping[int, Line]]) -> Outcome:
    empty = [
        f"{name} = {folder / FINGERPRINT_FILE}" for name, folder, of in zip("AB", folders, lines, strict=True) if not of
    ]
    if empty:
        verb = "are" if len(empty) > 1 else "is"
        why = f"{' and '.join(empty)} {verb} empty: that run has taken no step yet, or had none left to take"
    else:
        spans = " and ".join(f"{name}: {_span(of)}" for name, of in zip("AB", lines, strict=True))
        why = f"no iteration in common ({spans})"
    return Outcome(exit=Exit.NOT_COMPARABLE, verdict=f"not comparable: {why}")


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if "trace" in manifest:
        raise DamagedInputError(
            f"{folder} is a trace folder, which trace-compare takes; compare takes what runs had as --fingerprint-dir"
        )
    return manifest


def _span(lines: Mapping[int, Line]) -> str:
    return f"iterations {min(lines)} to {max(lines)}"


def as_settings(found: list[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Differences of manifests as facts of an outcome, with the flag of each."""
    return [{"field": path, "flag": flag_of(path), "a": a, "b": b} for path, a, b in found]


def _fixed_inputs_differ(inputs: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(inputs)} fixed input{'s' * (len(inputs) != 1)} differ{'s' * (len(inputs) == 1)}"


def setting_lines(facts: Mapping[str, Any]) -> list[str]:
    """What ``settings_said`` says, as details of an outcome."""
    return [f"  {said}" for said in settings_said(facts)]


def settings_said(facts: Mapping[str, Any]) -> list[str]:
    """What differs in what two runs were given, from the facts of an outcome: fixed inputs, then settings and
    surroundings that change no bit as long as all is well."""
    given = [each for part in ("differing_inputs", "differing_settings") for each in facts.get(part, ())]
    names = [f"{s['field']} ({s['flag']})" if s["flag"] != s["field"] else s["field"] for s in given]
    sides = [[shown_value(s["field"], s[side]) for side in ("a", "b")] for s in given]
    return [f"{name}: {a!r} in A, {b!r} in B" for name, (a, b) in zip(names, sides, strict=True)]


def _not_comparable(inputs: list[dict[str, Any]], names: Mapping[Path, str]) -> Outcome:
    places = ", ".join(f"{name} = {path}" for path, name in names.items())
    facts = {"differing_inputs": inputs}
    return Outcome(
        exit=Exit.NOT_COMPARABLE,
        verdict=f"not comparable: {_fixed_inputs_differ(inputs)} ({places})",
        details=tuple(setting_lines(facts)),
        facts=facts,
    )


def _different(
    iteration: int, fields: Mapping[str, tuple[Any, Any]], facts: Mapping[str, Any], notes: list[str]
) -> Outcome:
    action = next(text for ends, text in _NEXT if any(name.endswith(ends) for name in fields))
    return Outcome(
        exit=Exit.DIFFERENT,
        verdict=f"different: first at iteration {iteration}, in {', '.join(fields)}",
        details=(
            *notes,
            f"  A = {facts['a']}, B = {facts['b']}",
            *(f"  {name}: {_readable(a)} in A, {_readable(b)} in B" for name, (a, b) in fields.items()),
            *setting_lines(facts),
        ),
        next_action=action,
        facts={
            **facts,
            "first_difference": {
                "iteration": iteration,
                "fields": {name: {"a": a, "b": b} for name, (a, b) in fields.items()},
            },
        },
    )


_BISECT = "megatron-determinism bisect -- LAUNCH finds the operation"
_NEXT = (
    (("data", "consumed_samples"), "the runs read other batches: compare data, seed and where each went on from"),
    (("rng",), "the keys of random numbers differ: compare --seed and the iteration each went on from"),
    (("learning_rate",), "the schedules differ: compare the flags of learning rate and batch size"),
    (("loss",), f"a loss differs, so a forward or the weights it began from: {_BISECT}"),
    (("grad_norm",), f"the losses agree, so a backward or the reduction of gradients differs: {_BISECT}"),
    (("",), f"losses and gradient norm agree, so the update or the state it began from differs: {_BISECT}"),
)
"""What to do next, by the ends of names of fields that differ, in the order in which a step makes them."""


def _readable(value: int | str) -> str:
    """A value as it is stored, and as a decimal number where it is a hex float."""
    if isinstance(value, str) and (value.startswith(("0x", "-0x")) or value in ("nan", "inf", "-inf")):
        return f"{value} ({float.fromhex(value)!r})"
    return str(value)


def _identical(
    left: Mapping[int, Line], right: Mapping[int, Line], common: list[int], facts: Mapping[str, Any], notes: list[str]
) -> Outcome:
    compared = [
        key
        for key in left[common[0]]
        if any(left[i].get(key) is not None and right[i].get(key) is not None for i in common)
    ]
    details = [*notes, f"  compared: {', '.join(key for key in compared if key not in COUNTS)}"]
    for name, lines in (("A", left), ("B", right)):
        alone = len(lines) - len(common)
        if alone:
            details.append(f"  {name} has {alone} more iteration{'s' * (alone != 1)} ({_span(lines)} in all)")
    count = len(common)
    span = f"iterations {common[0]} to {common[-1]}" if count > 1 else f"iteration {common[0]}"
    return Outcome(
        exit=Exit.SAME,
        verdict=f"identical on all {count} common iteration{'s' * (count != 1)} ({span})",
        details=tuple(details),
        facts={**facts, "compared_fields": compared, "first_difference": None},
    )
