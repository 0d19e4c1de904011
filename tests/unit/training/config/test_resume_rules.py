"""What a resume may change: refused with both values, taken from the checkpoint, or left to the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.core.dist_checkpointing.facts import FACTS_FILE, encode_facts
from megatron.core.dist_checkpointing.folder import MARKER_FILE, iteration_folder, part_folder
from megatron.training.config.manifest import as_json, recipe_part, save_folder_problems, sources_part
from megatron.training.config.resolve import known_logical_layout, logical_layout
from megatron.training.config.resume_rules import (
    MODEL_MAY_CHANGE,
    find_source,
    require_same_model,
    resume_problems,
    schedule_of,
    takes_optimizer,
    with_stored_layout,
)
from megatron.training.config.run import RunConfig
from megatron.training.setup.command_line import start_up
from tests.support.settings import SMALL, effective, given

LOAD = ("--load", "x")


def stored_facts(**changes: Any) -> dict[str, Any]:
    """``metadata.json`` of the small command line on two ranks."""
    config = effective(world_size=2)
    facts = {
        "iteration": 4,
        "consumed_train_samples": 8,
        "consumed_valid_samples": 0,
        "step_count": 4,
        "schedule": dataclasses.asdict(schedule_of(config)),
        "schedule_position": 8,
        "logical_layout": dataclasses.asdict(logical_layout(config)),
        "physical_layout": {},
        "trajectory": {"recipe": config.with_effect("trajectory")},
        "branches": [],
        "has_optimizer": True,
        "has_generators": True,
        "tensors": {},
        "files": {},
    }
    return {**facts, **changes}


def write(root: Path, iteration: int = 4, **changes: Any) -> Path:
    """A folder with one checkpoint that holds nothing but its facts."""
    folder = iteration_folder(root, iteration)
    folder.mkdir(parents=True)
    (folder / FACTS_FILE).write_bytes(encode_facts(stored_facts(**changes)))
    (root / MARKER_FILE).write_text(str(iteration))
    return folder


def problems(root: Path, *flags: str, world_size: int = 2) -> list[str]:
    """What is wrong with going on from ``root`` with these flags."""
    words = ("--load", str(root), *flags)
    source = find_source(given(*words).checkpoint)
    assert source is not None
    config = effective(*words, *_layout_flags(given(*words), source, world_size), world_size=world_size)
    require_same_model(config, source)
    return [str(p) for p in resume_problems(config, known_logical_layout(config), source)]


def _layout_flags(config: RunConfig, source: Any, world_size: int) -> list[str]:
    parallel = with_stored_layout(config, source, world_size).parallel
    found = {
        "--logical-data-parallel-size": parallel.logical_data_parallel_size,
        "--logical-reduce-block-size": parallel.logical_reduce_block_size,
    }
    return [word for flag, size in found.items() if size is not None for word in (flag, str(size))]


def test_plain_resume_is_taken(tmp_path: Path) -> None:
    write(tmp_path)
    assert problems(tmp_path) == []


def test_logical_size_comes_from_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path)
    config = given(*LOAD)
    source = find_source(given("--load", str(tmp_path)).checkpoint)
    for ranks, size in ((1, 2), (2, 2), (3, None), (4, None)):
        assert with_stored_layout(config, source, ranks).parallel.logical_data_parallel_size == size
    assert with_stored_layout(config, None, 2) == config
    new = given(*LOAD, "--new-logical-layout")
    assert with_stored_layout(new, source, 2) == new
    assert problems(tmp_path, world_size=1) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--micro-batch-size", "2", "--global-batch-size", "4"), "--micro-batch-size (micro_batch_size 1), or --new"),
        (("--expert-model-parallel-size", "2"), "ep 2"),
        (("--tensor-model-parallel-size", "2", "--sequence-parallel"), "re-cutting them is not built yet"),
        (("--make-vocab-size-divisible-by", "8"), "padded_vocab_size 264"),
    ],
)
def test_another_logical_layout_names_both(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    write(tmp_path)
    found = [text for text in problems(tmp_path, *flags) if "another logical layout" in text]
    assert len(found) == 1
    assert expected in found[0]
    assert "the checkpoint's is tp 1, etp 1, padded_vocab_size 384" in found[0]


def test_ranks_that_do_not_divide_the_logical_size_are_another_layout(tmp_path: Path) -> None:
    write(tmp_path)
    (found,) = [text for text in problems(tmp_path, world_size=4) if "another logical layout" in text]
    assert "the checkpoint's is tp 1" in found
    assert "ldp 2, " in found
    assert "ldp 4, " in found
    assert "or --new-logical-layout" in found


def test_new_logical_layout_frees_all_but_the_cuts(tmp_path: Path) -> None:
    write(tmp_path)
    new = "--new-logical-layout"
    assert problems(tmp_path, new, "--expert-model-parallel-size", "2") == []
    assert problems(tmp_path, new, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert problems(tmp_path, "--finetune", "--expert-model-parallel-size", "2") == []


SCHEDULE = ("--min-lr", "1e-4")


def test_another_schedule_shows_both_unless_one_is_chosen(tmp_path: Path) -> None:
    write(tmp_path)
    (text,) = problems(tmp_path, *SCHEDULE)
    assert "another schedule: --min-lr: 0.0001" in text
    assert f"that of {tmp_path / 'iter_0000004'}: --min-lr: 0.0" in text
    for flag in ("--override-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        assert problems(tmp_path, *SCHEDULE, flag) == []
    for flag in ("--no-load-optim", "--finetune"):
        assert problems(tmp_path, *SCHEDULE, flag) == []


def test_longer_training_is_another_schedule(tmp_path: Path) -> None:
    write(tmp_path)
    (text,) = problems(tmp_path, "--train-iters", "5")
    assert "given another schedule: --train-iters or --train-samples: 10 samples; needed" in text
    (text,) = problems(tmp_path, "--lr-decay-iters", "4", "--train-iters", "5")
    assert "--lr-decay-iters or --lr-decay-samples (not given: the length of training): 8 samples" in text
    assert "_samples" not in text


def test_missing_optimizer_state_is_refused(tmp_path: Path) -> None:
    write(tmp_path, has_optimizer=False, step_count=None)
    (text,) = problems(tmp_path)
    assert "--no-load-optim or --finetune" in text
    assert problems(tmp_path, "--no-load-optim") == []
    source = find_source(given("--load", str(tmp_path), "--finetune").checkpoint)
    assert not takes_optimizer(given("--finetune").checkpoint, source)


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (text,) = problems(tmp_path, "--optimizer", "sgd")
    assert "--optimizer sgd with moments of adam" in text
    assert problems(tmp_path, "--optimizer", "sgd", "--no-load-optim") == []


@pytest.mark.parametrize("name", sorted(effective().with_effect("trajectory")["model"]))
def test_every_setting_of_the_model_is_compared_or_free(tmp_path: Path, name: str) -> None:
    """The stored value is another one: refused as another model, unless the setting is one of those that may change."""
    facts = stored_facts()
    facts["trajectory"]["recipe"]["model"][name] = "another"
    write(tmp_path, **facts)
    config = effective("--load", str(tmp_path), world_size=2)
    source = find_source(config.checkpoint)
    if name in MODEL_MAY_CHANGE - {"max_position_embeddings"}:
        require_same_model(config, source)
        return
    with pytest.raises(DamagedInputError, match=rf"another model: {name} is 'another' there and .* here"):
        require_same_model(config, source)


def test_positions_may_change_where_no_table_is_learned(tmp_path: Path) -> None:
    facts = stored_facts()
    facts["trajectory"]["recipe"]["model"] |= {"position_embedding_type": "rope", "max_position_embeddings": 99}
    write(tmp_path, **facts)
    assert problems(tmp_path, "--position-embedding-type", "rope") == []


def test_pipes_of_the_pattern_are_no_difference(tmp_path: Path) -> None:
    facts = stored_facts()
    facts["trajectory"]["recipe"]["model"]["hybrid_layer_pattern"] = "M|-*|E"
    write(tmp_path, **facts)
    assert problems(tmp_path) == []


def test_nothing_to_load_is_a_start_from_the_seed_or_an_error(tmp_path: Path) -> None:
    words = ("--load", str(tmp_path / "none"))
    assert find_source(given(*words).checkpoint) is None
    with pytest.raises(DamagedInputError, match=f"{MARKER_FILE}: no such file, and --exit-on-missing-checkpoint"):
        find_source(given(*words, "--exit-on-missing-checkpoint").checkpoint)


def test_pretrained_weights_where_load_has_nothing(tmp_path: Path) -> None:
    write(tmp_path / "pretrained")
    words = ("--load", str(tmp_path / "none"), "--pretrained-checkpoint", str(tmp_path / "pretrained"))
    source = find_source(given(*words).checkpoint)
    assert source is not None and source.weights_only
    write(tmp_path / "none", 8)
    source = find_source(given(*words).checkpoint)
    assert source is not None and not source.weights_only
    with pytest.raises(DamagedInputError, match=MARKER_FILE):
        find_source(given("--pretrained-checkpoint", str(tmp_path / "nowhere")).checkpoint)


def test_another_iteration_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 8)
    source = find_source(given("--load", str(tmp_path), "--ckpt-step", "4").checkpoint)
    assert source is not None and source.folder.name == "iter_0000004"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--save x", "how often to save"),
        ("--save x --save-interval 2 --save-retain-interval 3", "a multiple of --save-interval"),
        ("--save-retain-interval 3", "a multiple of --save-interval"),
        ("--async-save", "--async-save without --save"),
        ("--ckpt-step 3", "--ckpt-step without --load"),
        ("--finetune", "--finetune without --load"),
        ("--new-logical-layout", "--new-logical-layout without --load"),
        ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint without --load"),
        ("--override-ckpt-iteration 3 --finetune --load x", "--override-ckpt-iteration with --finetune"),
        (
            "--load x --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler",
        ),
    ],
)
def test_settings_that_contradict_each_other(flags: str, expected: str) -> None:
    assert any(expected in str(problem) for problem in given(*flags.split()).checkpoint.problems())


def test_settings_that_go_together() -> None:
    words = "--save x --persistent-save-interval 2 --save-retain-interval 4 --async-save --load x --ckpt-step 2"
    config = given(*words.split()).checkpoint
    assert config.problems() == []
    assert config.save_interval == 2


def _start(*words: str) -> tuple[str, ...]:
    """Notes of a start with these flags, checked as a launch does."""
    return start_up([*SMALL, *words], {}).notes


def test_an_empty_or_missing_folder_is_a_start_from_the_seed_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.log").touch()
    part_folder(tmp_path / "own", 4).mkdir()
    (tmp_path / "empty").mkdir()
    for name, more in {
        "none": (),
        "empty": (),
        "own": ("--save", str(tmp_path / "own"), "--save-interval", "2"),
    }.items():
        folder = str(tmp_path / name)
        (note,) = _start("--load", folder, *more)
        assert note == f"--load {folder} holds no checkpoint: training starts from the seed"


@pytest.mark.parametrize(
    "what", ["a complete checkpoint", "Megatron's folder", "another program's model", "an old one"]
)
def test_a_folder_with_something_else_in_it_is_no_start_from_the_seed(tmp_path: Path, what: str) -> None:
    own: tuple[str, ...] = ("--save", str(tmp_path), "--save-interval", "2")
    if what == "a complete checkpoint":
        write(tmp_path, 4)
        (tmp_path / MARKER_FILE).unlink()
    elif what == "Megatron's folder":
        (tmp_path / "iter_0000500" / ".metadata").mkdir(parents=True)
    elif what == "an old one":
        (tmp_path / "iter_0000004.old").mkdir()
    else:
        own = ()
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(DamagedInputError) as refused:
        _start("--load", str(tmp_path), *own)
    named = "model.safetensors" if not own else "iter_0000"
    assert all(word in str(refused.value) for word in (str(tmp_path), named, MARKER_FILE, "--load", "--ckpt-step"))


def test_a_marker_that_is_none_names_the_flags(tmp_path: Path) -> None:
    write(tmp_path, 4)
    (tmp_path / MARKER_FILE).write_text("release")
    with pytest.raises(DamagedInputError, match=r"'release', not an iteration; change --load, or .* --ckpt-step"):
        _start("--load", str(tmp_path))


def test_of_another_model_what_was_given_is_said_before_what_follows(tmp_path: Path) -> None:
    write(tmp_path, 4)
    named = r"another model: hidden_size is 64 there and 128 here \(--hidden-size\); .*kv_channels is 16 there"
    with pytest.raises(DamagedInputError, match=named):
        _start("--load", str(tmp_path), "--hidden-size", "128")


def test_a_step_that_is_not_there_names_those_that_are_once(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with pytest.raises(DamagedInputError, match=r"-step names it; --ckpt-step takes one of 4; change --load$"):
        _start("--load", str(tmp_path), "--ckpt-step", "77")


def test_a_step_below_0_is_a_wrong_flag_and_no_missing_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with pytest.raises(ConfigError, match="given --ckpt-step -3; needed: at least 0"):
        _start("--load", str(tmp_path), "--ckpt-step", "-3")


def saving(root: Path, *flags: str) -> list[str]:
    """What keeps a run of one rank from saving into ``root``."""
    try:
        start_up([*SMALL, "--save", str(root), "--save-interval", "2", *flags], {})
    except ConfigError as error:
        (problem,) = error.problems
        return problem.given.removeprefix(f"--save {root} with checkpoints of another run: ").split("; ")
    return []


def test_checkpoints_of_another_run_are_not_saved_over(tmp_path: Path):
    root, other = tmp_path / "mine", tmp_path / "other"
    assert saving(root, "--lr", "0.5") == []
    config, clip = effective(), "--clip-grad is 1.0 there and 2.0 here"
    layout = dataclasses.asdict(logical_layout(config))
    for folder in (root, other):
        trajectory = {**recipe_part(config), "logical_layout": layout}
        write(folder, trajectory=trajectory, logical_layout=layout, schedule=dataclasses.asdict(schedule_of(config)))
    assert saving(root) == [], "a requeued job without --load makes the same checkpoints again"
    assert saving(root, "--clip-grad", "2", "--seed", "7") == [clip, "--seed is 1234 there and 7 here"]
    assert saving(root, "--clip-grad", "2", "--load", str(root)) == [], "it goes on from there"
    assert saving(root, "--clip-grad", "2", "--load", str(other)) == [clip]
    assert saving(root, "--clip-grad", "2", "--load", str(root), "--finetune") == [clip]
    assert saving(root, "--clip-grad", "2", "--skip-train", "--eval-interval", "1") == [], "nothing is saved"
    (root / MARKER_FILE).unlink()
    assert saving(root, "--clip-grad", "2") == [clip], "a lost marker does not make them nobody's"
    (iteration_folder(root, 4) / FACTS_FILE).write_text("{")
    with pytest.raises(DamagedInputError, match=r"metadata\.json is damaged .*; change --save"):
        saving(root)


def test_other_data_there_are_named_by_file_and_weight(tmp_path: Path):
    words = ("--no-mock-data", "--save", str(tmp_path), "--save-interval", "2", "--data-path")
    config = effective(*words, "0.3", "a", "0.7", "b")
    trajectory = recipe_part(config) | {"data_digest": "d1"}
    write(tmp_path, trajectory=as_json(trajectory), sources=sources_part(config.with_effect("operational")))

    def said(*blend: str) -> str:
        (problem,) = save_folder_problems(effective(*words, *blend), None, as_json(trajectory | {"data_digest": "d2"}))
        return problem.given.partition(" of another run: ")[2]

    assert said("0.5", "a", "0.5", "b") == "--data-path is 0.3 a 0.7 b there and 0.5 a 0.5 b here"
    assert said("0.3", "a", "0.7", "b") == "data_digest is d1 there and d2 here"
