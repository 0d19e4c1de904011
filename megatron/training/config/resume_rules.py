"""What a run that starts from a checkpoint may change; decided from ``metadata.json``, before torch is loaded.

Precedence: the logical layout comes from the checkpoint unless ``--new-logical-layout`` is given; the schedule must be
the checkpoint's unless one of the two schedule flags says whose counts; what weights mean must be the checkpoint's;
every other setting is the command line's, and a change is announced and recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DamagedInputError, Problem
from megatron.core.config.fields import flags_of
from megatron.core.dist_checkpointing.facts import Facts, read_facts
from megatron.core.dist_checkpointing.folder import MARKER_FILE, find_checkpoint
from megatron.core.optimizer.optimizer_param_scheduler import SCHEDULE_FLAGS
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.resolve import data_parallel_size, schedule_of
from megatron.training.config.run import RunConfig

MODEL_MAY_CHANGE = frozenset(
    {
        "apply_wd_to_qk_layernorm",
        "attention_dropout",
        "bf16",
        "calculate_per_token_loss",
        "embedding_init_method_std",
        "fp32_residual_connection",
        "hidden_dropout",
        "init_method_std",
        "max_position_embeddings",
        "moe_aux_loss_coeff",
        "moe_expert_capacity_factor",
        "moe_input_jitter_eps",
        "moe_pad_expert_input_to_capacity",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_force_load_balancing",
        "moe_router_load_balancing_type",
        "moe_token_drop_policy",
        "moe_z_loss_coeff",
        "mtp_loss_scaling_factor",
        "seq_length",
    }
)
"""Settings of the model that change how training goes on, not what the stored weights mean."""

_FIXED_LAYOUT = {
    "tp": "--tensor-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "padded_vocab_size": "--make-vocab-size-divisible-by, --padded-vocab-size",
}
_FREE_LAYOUT = {
    "ep": "--expert-model-parallel-size",
    "ldp": "--logical-data-parallel-size",
    "block": "--logical-reduce-block-size",
    "micro_batch_size": "--micro-batch-size",
}
LAYOUT_FLAGS = {**_FIXED_LAYOUT, **_FREE_LAYOUT}
"""What decides each field of the logical layout on the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The checkpoint a run starts from. With ``weights_only`` it is a new run, at iteration 0."""

    folder: Path
    facts: Facts
    weights_only: bool


@contextlib.contextmanager
def saying_what_to_change(config: CheckpointConfig) -> Iterator[None]:
    """What is wrong with the checkpoint to load is said with the flags that choose another."""
    try:
        yield
    except DamagedInputError as error:
        flags = {"--load": config.load, "--pretrained-checkpoint": config.pretrained_checkpoint}
        change = " or ".join(flag for flag, value in flags.items() if value is not None)
        said = config.load is None or "--ckpt-step" in str(error)
        choose = "" if said else ", or choose an iteration with --ckpt-step"
        raise DamagedInputError(f"{error}; change {change}{choose}") from error


def find_source(config: CheckpointConfig) -> Source | None:
    """The checkpoint that the settings name; ``None`` for a start from the seed.

    Raises:
        DamagedInputError: the named one is missing, incomplete or damaged, or ``--exit-on-missing-checkpoint`` is
            given and there is none.
    """
    with saying_what_to_change(config):
        folder = None if config.load is None else find_checkpoint(Path(config.load), config.ckpt_step)
        weights_only = config.finetune
        if folder is None and config.pretrained_checkpoint is not None:
            folder, weights_only = find_checkpoint(Path(config.pretrained_checkpoint)), True
            if folder is None:
                raise DamagedInputError(f"{Path(config.pretrained_checkpoint) / MARKER_FILE}: no such file")
        if folder is None:
            if config.exit_on_missing_checkpoint and config.load is not None:
                marker = Path(config.load) / MARKER_FILE
                raise DamagedInputError(f"{marker}: no such file, and --exit-on-missing-checkpoint is given")
            return None
        return Source(folder=folder, facts=read_facts(folder), weights_only=weights_only)


def require_nothing_to_load(config: CheckpointConfig) -> list[str]:
    """Where ``find_source`` has found nothing: a folder that is empty or missing, or one that the run saves into itself
    and that holds no checkpoint yet, means a start from the seed. Returns words that say so.

    Raises:
        DamagedInputError: ``--load`` names a folder with checkpoints that no marker names, or with other things.
    """
    if config.load is None:
        return []
    root = Path(config.load)
    unnamed = sorted(path.name for path in root.glob("iter_*") if not path.name.endswith(".part"))
    if unnamed:
        shown = ", ".join(unnamed[:4]) + ", ..." * (len(unnamed) > 4)
        raise DamagedInputError(
            f"{root} has {shown} but no {MARKER_FILE}, which names the newest checkpoint; choose one with --ckpt-step, "
            "or change --load"
        )
    own = config.save is not None and Path(config.save).resolve() == root.resolve()
    others = sorted(path.name for path in root.iterdir()) if root.is_dir() and not own else []
    if others:
        shown = ", ".join(others[:4]) + ", ..." * (len(others) > 4)
        raise DamagedInputError(
            f"{root} holds no checkpoint: there is no {MARKER_FILE}, but {shown}; change --load, or choose an "
            "iteration with --ckpt-step"
        )
    return [f"--load {root} holds no checkpoint: training starts from the seed"]


def with_stored_layout(given: RunConfig, source: Source | None, world_size: int) -> RunConfig:
    """The settings with the checkpoint's logical data-parallel size and block, where none are given and it rules.

    A size that the data-parallel ranks do not divide is not taken: the run has another layout, and that is refused.
    """
    if source is None or source.weights_only or given.checkpoint.new_logical_layout:
        return given
    stored, parallel = source.facts["logical_layout"], given.parallel
    ldp, block = parallel.logical_data_parallel_size, parallel.logical_reduce_block_size
    if ldp is None:
        ranks, ldp = data_parallel_size(parallel, world_size), stored.get("ldp")
        if ranks is not None and ldp is not None and ldp % ranks:
            return given
    if block is None:
        block = stored.get("block")
    parallel = dataclasses.replace(parallel, logical_data_parallel_size=ldp, logical_reduce_block_size=block)
    return dataclasses.replace(given, parallel=parallel)


def require_same_model(config: RunConfig, source: Source, named: Collection[tuple[str, str]] = frozenset()) -> None:
    """The settings that say what weights mean are those of the checkpoint. ``named`` are (group, field) of those that
    were given, which are said first: others may follow from them.

    Raises:
        DamagedInputError: the checkpoint is of another model; names every setting that differs.
    """
    stored = source.facts["trajectory"].get("recipe", {}).get("model", {})
    mine = config.with_effect("trajectory")["model"]
    owner: type = type(config.model)
    flags = {flag.name: f" ({flag.spellings[0]})" for flag in flags_of(owner)}
    wrong = []
    # The rows of a learned table are weights.
    rows = {"max_position_embeddings"} if config.model.position_embedding_type == "learned_absolute" else set()
    for name in sorted(mine, key=lambda name: ("model", name) not in named):
        value = mine[name]
        if name in MODEL_MAY_CHANGE - rows or name not in stored:
            continue
        theirs = stored[name]
        if name == "hybrid_layer_pattern":
            value, theirs = (text.replace("|", "") if text else text for text in (value, theirs))
        if value != theirs:
            wrong.append(f"{name} is {theirs!r} there and {value!r} here{flags.get(name, '')}")
    if wrong:
        raise DamagedInputError(
            f"{source.folder} is a checkpoint of another model: {'; '.join(wrong)}; give the checkpoint's values, or "
            "change --load"
        )


def resume_problems(config: RunConfig, layout: Mapping[str, Any], source: Source) -> list[Problem]:
    """Why a run with these resolved settings cannot start from this checkpoint.

    ``layout`` holds the fields of the logical layout that are known.
    """
    return [
        *_layout_problems(config, layout, source),
        *_content_problems(config, source),
        *_schedule_problems(config, source),
    ]


def _layout_problems(config: RunConfig, layout: Mapping[str, Any], source: Source) -> Iterator[Problem]:
    stored = source.facts["logical_layout"]
    both = f"the checkpoint's is {_words(stored)}, this run's is {_words(layout)}"
    different = different_layout(layout, source)
    fixed = [name for name in _FIXED_LAYOUT if name in different]
    if fixed:
        flags = ", ".join(f"{_FIXED_LAYOUT[name]} ({name} {stored.get(name)})" for name in fixed)
        yield Problem(
            f"another logical layout than {source.folder} has ({both})",
            f"the same {', '.join(fixed)}: tensors are stored in these cuts, and re-cutting them is not built yet",
            flags,
        )
    free = [name for name in _FREE_LAYOUT if name in different]
    if free and not fixed and not source.weights_only and not config.checkpoint.new_logical_layout:
        flags = ", ".join(f"{_FREE_LAYOUT[name]} ({name} {stored.get(name)})" for name in free)
        yield Problem(
            f"another logical layout than {source.folder} has ({both})",
            "the layout of the first launch, which fixes the order of every sum",
            f"{flags}, or --new-logical-layout to carry the state into a new trajectory",
        )


def _words(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {layout[name]}" for name in LAYOUT_FLAGS if layout.get(name) is not None)


def _content_problems(config: RunConfig, source: Source) -> Iterator[Problem]:
    if takes_optimizer(config.checkpoint, source) and not source.facts["has_optimizer"]:
        yield Problem(
            f"--load {config.checkpoint.load}, whose checkpoint {source.folder.name} has no optimizer state",
            "moments and step count, or leave to start without them",
            "add --no-load-optim or --finetune",
        )
    stored = source.facts["trajectory"].get("recipe", {}).get("optimizer", {}).get("optimizer")
    if takes_optimizer(config.checkpoint, source) and stored not in (None, config.optimizer.optimizer):
        yield Problem(
            f"--optimizer {config.optimizer.optimizer} with moments of {stored} in {source.folder}",
            "moments of the same optimizer, or leave to start without them",
            f"--optimizer {stored}, or --no-load-optim or --finetune",
        )


def takes_optimizer(config: CheckpointConfig, source: Source) -> bool:
    """Whether moments, step count and the position on the schedule are taken from the checkpoint."""
    return config.load_optim and not source.weights_only


def different_schedule(config: RunConfig, source: Source) -> list[str]:
    """The numbers of the schedule that are not the checkpoint's, by name."""
    stored = source.facts["schedule"]
    return [name for name, value in dataclasses.asdict(schedule_of(config)).items() if value != stored.get(name)]


def different_layout(layout: Mapping[str, Any], source: Source) -> list[str]:
    """The known fields of a logical layout that are not the checkpoint's, by name."""
    stored = source.facts["logical_layout"]
    return [name for name, size in layout.items() if size not in (None, stored.get(name))]


def _schedule_problems(config: RunConfig, source: Source) -> Iterator[Problem]:
    settings = config.checkpoint
    if not takes_optimizer(settings, source) or settings.override_opt_param_scheduler:
        return
    if settings.use_checkpoint_opt_param_scheduler:
        return
    mine, stored = dataclasses.asdict(schedule_of(config)), source.facts["schedule"]
    different = different_schedule(config, source)
    if all(numbers.get("decay_samples") == numbers.get("wd_incr_samples") for numbers in (mine, stored)):
        # A decay that ends with the training follows its length: said once.
        different = [name for name in different if name != "decay_samples"]
    if different:
        yield Problem(
            "another schedule: " + "; ".join(_number(name, mine[name]) for name in different),
            f"that of {source.folder}: " + "; ".join(_number(name, stored.get(name)) for name in different),
            "these flags, or add --use-checkpoint-opt-param-scheduler or --override-opt-param-scheduler",
        )


def _number(name: str, value: object) -> str:
    """A number of a schedule with the flags it comes from."""
    return f"{SCHEDULE_FLAGS[name]}: {value}{' samples' * name.endswith('_samples')}"
