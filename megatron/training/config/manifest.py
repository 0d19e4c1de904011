"""``manifest.json`` of fingerprint and trace folders as it is read back, and whether a run may write beside it, or
beside checkpoints that are there.

What comparable runs agree on is its *trajectory* part; ``observe/run_manifest.py`` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError, Problem
from megatron.core.config.fields import flags_of
from megatron.core.datasets.splits import SPLIT_NAMES
from megatron.core.dist_checkpointing.facts import read_facts
from megatron.core.dist_checkpointing.folder import complete_iterations, find_checkpoint
from megatron.core.trace.format import TRACE_FILES
from megatron.training.config.resolve import known_logical_layout
from megatron.training.config.resume_rules import LAYOUT_FLAGS, Source
from megatron.training.config.run import RunConfig, config_classes

MANIFEST_FILE = "manifest.json"
_NAMED = 5
EARLIER = "earlier_"
"""Beginning of the folders in a run folder that hold what earlier runs left there."""

Json = dict[str, Any]

_AFTER_TOKENIZER = ("recipe.tokenizer.padded_vocab_size", "logical_layout.padded_vocab_size")
"""Not known before the tokenizer is read, of some types."""


def recipe_part(config: RunConfig) -> Json:
    """The settings of a resolved configuration that change numbers, and the seed beside them.

    The pipes of the pattern say where stages begin, which changes no bit: they are left out.
    """
    recipe = config.with_effect("trajectory")
    pattern = config.model.hybrid_layer_pattern
    if pattern is not None:
        recipe["model"]["hybrid_layer_pattern"] = pattern.replace("|", "")
    seed = recipe["training"].pop("seed")
    return {"recipe": recipe, "seed": seed}


def as_json(value: Any) -> Any:
    """The value as it will be read back: tuples as lists, keys as text."""
    return json.loads(json.dumps(value))


def differences(left: Any, right: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Leaves that differ between two JSON values, as (dotted path, left, right); ``None`` for one that is missing."""
    if isinstance(left, dict) and isinstance(right, dict):
        found = []
        for key in dict.fromkeys([*left, *right]):
            found += differences(left.get(key), right.get(key), f"{path}.{key}" if path else key)
        return found
    # 1 and 1.0 are one setting written twice; True and 1 are not.
    same = left == right and isinstance(left, bool) == isinstance(right, bool)
    return [] if same else [(path, left, right)]


def launch_differences(left: list[Json], right: list[Json]) -> list[tuple[str, Any, Any]]:
    """As ``differences``, between the last launches of two runs: what could move a bit if something was wrong, without
    what says where results go and when to stop."""
    mine, theirs = (
        {name: launch.get(name) for launch in launches[-1:] for name in _LAUNCHED} for launches in (left, right)
    )
    return [each for each in differences(mine, theirs) if not each[0].startswith(_RESULTS)]


_LAUNCHED = ("world_size", "hybrid_layer_pattern", "distributed_backend", "nccl", "layout", "operational")
_RESULTS = (
    *(f"operational.{group}." for group in ("checkpoint", "logging", "fingerprint", "trace", "profile")),
    "operational.training.exit_",
)


def read_manifest(folder: Path) -> Json:
    """The manifest of a fingerprint or trace folder.

    Raises:
        DamagedInputError: it is missing or damaged; names the file, and the folder that may be meant.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DamagedInputError(f"{path}: no such file; {_meant(folder)}")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedInputError(f"{path} is damaged ({error})") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("trajectory"), dict):
        raise DamagedInputError(f"{path} is damaged (it has no trajectory)")
    launches = manifest.get("launches")
    if not isinstance(launches, list):
        raise DamagedInputError(f"{path} has no launches, as in a --run-dir; {_meant(folder)}")
    if not all(isinstance(launch, dict) for launch in launches):
        raise DamagedInputError(f"{path} is damaged (a launch is no object)")
    return manifest


def _meant(folder: Path) -> str:
    """Which folder to name in place of one without fingerprints and without a trace."""
    near = sorted(str(p.parent) for p in folder.glob(f"*/{MANIFEST_FILE}") if not p.parent.name.startswith(EARLIER))
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return "name what a run had as --fingerprint-dir (for compare) or --trace-dir (for trace-compare)"


def folder_problems(folder: Path, trajectory: Json, operational: Json) -> list[Problem]:
    """Why a run with this trajectory, and settings that change no bit, cannot write its fingerprint into the folder;
    every rank asks for itself before the first writes.

    Raises:
        DamagedInputError: the folder holds a damaged manifest.
    """
    if not (folder / MANIFEST_FILE).exists():
        return []
    there = read_manifest(folder)
    launch: Json = there["launches"][-1] if there["launches"] else {}
    then, now = sources_part(launch.get("operational", {})), sources_part(operational)
    found = with_sources(differences(there["trajectory"], trajectory), then, now)
    return _unlike_prints(folder, found)


def _unlike_prints(folder: Path, found: list[tuple[str, Any, Any]]) -> list[Problem]:
    if not found:
        return []
    given = f"--fingerprint-dir {folder} with the fingerprint of another run: {_both(found)}"
    needed = "a folder without a fingerprint, or with this run's"
    change = "another --fingerprint-dir, or the settings of the run that is there"
    return [Problem(given, needed, f"{change}{_left_out(found)}", local=True)]


def _both(found: list[tuple[str, Any, Any]]) -> str:
    """What two runs differ in, as "--seed is 1 there and 2 here"; the first few."""
    named = [
        f"the run there {_way(then)}, this one {_way(now)}"
        if path == "branches"
        else f"{flag_of(path)} is {shown_value(path, then)} there and {shown_value(path, now)} here"
        for path, then, now in telling(found)
    ]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{'; '.join(named[:_NAMED])}{more}"


def _way(branches: Any) -> str:
    """How a run came to where it is, from its branches."""
    if not branches:
        return "started from the seed and kept its settings"
    steps = (f"of iteration {each['iteration']} ({', '.join(each['why'])})" for each in branches)
    return f"took over the checkpoint {', then that '.join(steps)}"


def _left_out(found: list[tuple[str, Any, Any]]) -> str:
    """The flags behind the last branch, where nothing else differs: a launch that only goes on does without them."""
    branches = next((now for path, _, now in telling(found) if path == "branches"), None)
    flags = [why for why in branches[-1]["why"] if why.startswith("--")] if branches else []
    return f"; or leave out {', '.join(flags)}, to go on with the run that is there" if flags else ""


_SOURCES = {
    "data": ("data_path", "data_args_path", "per_split_data_args_path", *(f"{s}_data_path" for s in SPLIT_NAMES)),
    "tokenizer": ("tokenizer_model", "vocab_file", "merge_file"),
}
_CHOOSE_DATA = ("recipe.data.", "recipe.tokenizer.", "recipe.training.", "recipe.model.seq_length", "seed")


def sources_part(operational: Json) -> Json:
    """The settings that name files of data and tokenizer: no bit depends on where those lie."""
    return as_json({group: {n: operational.get(group, {}).get(n) for n in names} for group, names in _SOURCES.items()})


def with_sources(found: list[tuple[str, Any, Any]], then: Json, now: Json) -> list[tuple[str, Any, Any]]:
    """Differences of two trajectories, where the digest of their data gives way to what was named otherwise: files, and
    settings that choose samples. It stays where nothing of that differs."""
    if not any(path == "data_digest" for path, _, _ in found):
        return found
    named = differences(then, now, "operational")
    if not named and not any(path.startswith(_CHOOSE_DATA) for path, _, _ in found):
        return found
    return [each for each in found if each[0] != "data_digest"] + named


def telling(found: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Differences without where the runs branched off, which says nothing more beside what they differ in."""
    return [each for each in found if each[0] != "branches"] or found


def shown_value(path: str, value: Any) -> Any:
    """A value of a manifest for people: where a run branched off in words, lists as a command line has them."""
    if path != "branches":
        return " ".join(map(str, value)) if isinstance(value, list) else value
    return ", ".join(f"at iteration {each['iteration']} ({', '.join(each['why'])})" for each in value or ()) or "none"


def flag_of(path: str) -> str:
    """The flag behind a field of the manifest; the field where there is none, as for versions."""
    part, _, rest = path.partition(".")
    group, _, name = rest.partition(".")
    if part == "seed":
        return "--seed"
    if part == "logical_layout":
        return LAYOUT_FLAGS.get(rest, path)
    classes = config_classes() if part in ("recipe", "layout", "operational") else {}
    flags = flags_of(classes[group]) if group in classes else ()
    return next((flag.spellings[0] for flag in flags if flag.name == name), path)


def trace_folder_problems(folder: Path) -> list[Problem]:
    """Why a trace cannot be written into the folder: each launch gets a folder of its own."""
    if not (folder / MANIFEST_FILE).exists() and not any(folder.glob(TRACE_FILES)):
        return []
    return [Problem(f"--trace-dir {folder}", "a folder that holds no trace yet", "another --trace-dir", local=True)]


def save_folder_problems(config: RunConfig, source: Source | None, trajectory: Json | None = None) -> list[Problem]:
    """Why a run may not save where it is told to: its checkpoints would take the place of those of another run there.
    One that goes on from a checkpoint in that folder may, whatever has changed.

    ``trajectory`` is the whole one; without it, what the resolved settings say of it is compared.

    Raises:
        DamagedInputError: the newest checkpoint there cannot be read.
    """
    settings = config.checkpoint
    root = Path(settings.save) if settings.save is not None and not config.training.skip_train else None
    iterations = [] if root is None else complete_iterations(root)
    if root is None or not iterations:
        return []
    if source is not None and not source.weights_only and source.folder.parent.samefile(root):
        return []
    folder = find_checkpoint(root, iterations[-1])
    assert folder is not None, "it is complete"
    try:
        facts = read_facts(folder)
    except DamagedInputError as error:
        raise DamagedInputError(f"{error}; change --save") from error
    if trajectory is None:
        found = _known_differences(facts["trajectory"], config)
    else:
        now = sources_part(config.with_effect("operational"))
        found = with_sources(differences(facts["trajectory"], trajectory), facts.get("sources", now), now)
    if not found:
        return []
    given = f"--save {root} with checkpoints of another run: {_both(found)}"
    go_on = "" if source is not None else f", or --load {root} to go on from there"
    change = f"another --save{go_on}, or remove the checkpoints that are there{_left_out(found)}"
    return [Problem(given, "a folder without checkpoints, or with this run's", change, local=True)]


def used_folder_problems(config: RunConfig, source: Source | None = None) -> list[Problem]:
    """Why a run with these resolved settings, from this checkpoint, cannot write into its folders, as far as that is
    known before torch is loaded: recipe, seed and logical layout. ``folder_problems`` compares the rest for a
    fingerprint, ``save_folder_problems`` for checkpoints.

    Raises:
        DamagedInputError: a folder holds a damaged manifest, or a checkpoint that cannot be read.
    """
    trace, prints = config.trace.trace_dir, config.fingerprint.fingerprint_dir
    problems = [] if trace is None else trace_folder_problems(Path(trace))
    # With this flag the checkpoint's settings of the schedule are those of the run.
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        return problems
    problems += save_folder_problems(config, source)
    if prints is not None and (Path(prints) / MANIFEST_FILE).exists():
        found = _known_differences(read_manifest(Path(prints))["trajectory"], config)
        problems += _unlike_prints(Path(prints), found)
    return problems


def _known_differences(stored: Json, config: RunConfig) -> list[tuple[str, Any, Any]]:
    """Where a trajectory is not that of the settings, in what they say of one before the tokenizer is read."""
    mine = as_json({**recipe_part(config), "logical_layout": known_logical_layout(config)})
    found = differences({name: stored.get(name) for name in mine}, mine)
    return [each for each in found if each[0] not in _AFTER_TOKENIZER or each[2] is not None]
