"""The command line: Megatron's conventions, and every problem at once."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.fields import Flag, flags_of
from megatron.training.cli.parser import our_flags, parse, parse_run_config
from megatron.training.config.run import RunConfig, config_classes
from tests.support.cpu_time import cpu_of_children_s
from tests.support.settings import SMALL

EVERY_FLAG = [(group, flag) for group, cls in config_classes().items() for flag in flags_of(cls)]


def problems(*argv: str) -> list[str]:
    return [str(problem) for problem in parse(argv).problems]


def example(flag: Flag) -> tuple[list[str], object]:
    """Words for a flag, and the value they must give."""
    if flag.is_switch:
        return [], not flag.negates
    if typing.get_origin(flag.inner) is typing.Literal:
        value = typing.get_args(flag.inner)[-1]
    else:
        value = {int: 7, float: 0.5, str: "word"}[flag.inner]
    return ([str(value)] * 2, (value, value)) if flag.repeated else ([str(value)], value)


def test_nothing_given_is_the_defaults():
    assert parse_run_config([]) == RunConfig()


@pytest.mark.parametrize(("group", "flag"), EVERY_FLAG, ids=lambda x: x.name if isinstance(x, Flag) else x)
def test_every_spelling_of_every_flag_sets_its_field(group: str, flag: Flag):
    words, value = example(flag)
    for spelling in flag.spellings:
        config = parse_run_config([spelling, *words])
        assert getattr(getattr(config, group), flag.name) == value
    assert config != RunConfig() or value == flag.default


def test_spellings_belong_to_one_field():
    assert len(our_flags()) == sum(len(flag.spellings) for _, flag in EVERY_FLAG)


@pytest.mark.parametrize("spelling", ["--no-mmap-bin-files", "--disable-mmap-bin-files"])
def test_switch_that_is_on_has_both_negative_spellings(spelling: str):
    assert parse_run_config([]).data.mmap_bin_files
    assert not parse_run_config([spelling]).data.mmap_bin_files
    assert problems("--mmap-bin-files")


def test_bare_switch_can_be_taken_back():
    assert not parse_run_config(["--deterministic-mode", "--no-deterministic-mode"]).numerics.deterministic_mode
    assert parse_run_config(["--no-deterministic-mode", "--deterministic-mode"]).numerics.deterministic_mode
    for wrong in (["--no-lr"], ["--no-deterministic-mode", "1"], ["--no-no-mmap-bin-files"]):
        assert problems(*wrong)


def test_value_behind_an_equals_sign():
    config = parse_run_config(["--lr=1e-3", "--hybrid-layer-pattern=--M", "--data-path=a", "b"])
    assert (config.optimizer.lr, config.model.hybrid_layer_pattern) == (1e-3, "--M")
    assert config.data.data_path == ("a", "b")


def test_value_may_start_with_one_dash():
    config = parse_run_config(["--hybrid-layer-pattern", "-M", "--null-tokenizer-pad-id", "-1"])
    assert (config.model.hybrid_layer_pattern, config.tokenizer.null_tokenizer_pad_id) == ("-M", -1)


def test_last_of_repeated_flags_counts():
    assert parse_run_config(["--seed", "1", "--seed", "2"]).training.seed == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--hiden-size", "64"],
            "given --hiden-size 64; needed: a flag that exists, spelt out in full; change: did you",
        ),
        (["--seq", "4"], "did you mean --seq-length"),
        (["--hidden_size", "4"], "did you mean --hidden-size"),
        (["--zzzzzzzz"], "--help lists every flag"),
        (["--zzzzzzzz=1", "2", "3", "4"], "given --zzzzzzzz 1 2 3 ...; needed"),
        (
            ["--learning_rate", "3e-4"],
            "given --learning_rate 3e-4; needed: a flag that exists, spelt out in full; change: did",
        ),
        (["--learning-rate", "3e-4"], "did you mean --lr?"),
        (["--logdir", "a"], "did you mean --tensorboard-dir?"),
        (["--ckpt-format", "zip"], "given --ckpt-format zip; needed: torch_dist, the only value taken; change:"),
        (["--lr", "fast"], "given --lr fast; needed: a finite number that fp32 holds; change: --lr"),
        *((["--lr", x], f"given --lr {x}; needed: a finite number") for x in ("nan", "inf", "3.41e38", "-1e300")),
        *((["--lr", x], f"given --lr {x}; needed: a finite number") for x in ("1e-38", "-1e-300")),
        (["--seed", "1.5"], "given --seed 1.5; needed: a whole number of at most 18 digits; change: --seed"),
        (["--optimizer", "magic"], "given --optimizer magic; needed: one of adam, sgd; change: --optimizer"),
        (["--optimizer", "muon"], "given --optimizer muon; needed: one of adam, sgd; optimizers that step on whole"),
        (["--lr"], "given --lr without a value; needed: a finite number"),
        (["--lr", "--bf16"], "given --lr without a value"),
        (["--data-path"], "given --data-path without a value; needed: some text"),
        (["--lr", "1", "2"], "given '2' after --lr; needed: one value for --lr"),
        (["--lr", "1", "2", "3"], "given '2' '3' after --lr; needed: one value for --lr"),
        (["one", "two"], "given 'one' 'two'; needed: a flag (--name) before every value; change: name the flag, or"),
        (["--bf16", "true"], "given 'true' after --bf16; needed: no value for --bf16"),
        (["--bf16=true"], "given 'true' after --bf16"),
        (["--bf16", "-lr", "1"], "change: --lr if that flag is meant; flags begin with two dashes"),
        (["64", "--bf16"], "given '64'; needed: a flag (--name) before every value"),
    ],
)
def test_problem_is_named(argv: list[str], expected: str):
    (problem,) = problems(*argv)
    assert expected in problem


def test_every_problem_is_reported_at_once():
    argv = ["stray", "--hiden-size", "64", "65", "--lr", "x", "--fp16", "--context-parallel-size", "2", "--seed"]
    with pytest.raises(ConfigError, match="6 problems") as caught:
        parse_run_config(argv)
    assert caught.value.exit_code == 2


def test_flags_in_doubt_are_those_whose_value_is_not_known():
    parsed = parse(["--hiden-size", "64", "--lr", "x", "--seed", "3"])
    assert {"--hidden-size", "--lr"} <= parsed.doubtful
    assert "--seed" not in parsed.doubtful


@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_whole_number_of_more_than_64_bits_is_refused_in_few_words(digits: int):
    assert parse_run_config(["--seed", "9" * 18]).training.seed == 10**18 - 1
    (problem,) = problems("--seed", "9" * digits)
    assert "needed: a whole number of at most 18 digits" in problem
    assert len(problem) < 200


def test_torch_is_not_loaded_and_a_refusal_takes_under_two_seconds():
    code = (
        "import sys\nfrom megatron.training.cli.parser import parse\n"
        "assert parse(sys.argv[1:]).problems\nassert not {'torch', 'triton', 'tokenizers'} & set(sys.modules)"
    )
    before = cpu_of_children_s()
    subprocess.run([sys.executable, "-c", code, *SMALL, "--nonsense"], check=True)
    assert cpu_of_children_s() - before < 2.0
