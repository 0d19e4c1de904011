"""Nearest names and the shapes of values."""

from __future__ import annotations

from megatron.core.config.fields import flags_of
from megatron.training.cli.explain import HABITS, nearest_names, unknown_flag, value_shape
from megatron.training.cli.parser import our_flags, parse
from megatron.training.config.legacy_table import MEGATRON_FLAGS
from megatron.training.config.run import config_classes

KNOWN = ("--seq-length", "--sequence-parallel", "--hidden-size", "--seed")


def test_nearest_names_put_completions_first_and_know_underscores():
    assert nearest_names("--sequ", KNOWN)[0] == "--sequence-parallel"
    assert nearest_names("--hidden_size", KNOWN)[0] == "--hidden-size"
    assert nearest_names("--hiddensize", KNOWN)[0] == "--hidden-size"
    assert nearest_names("--completely-else", KNOWN) == []


def test_habits_lead_to_flags_and_stand_in_no_flags_way():
    habits = [habit for listed in HABITS.values() for habit in listed.split()]
    assert len(set(habits)) == len(habits)
    assert HABITS.keys() <= our_flags().keys()
    assert not [habit for habit in habits if habit in our_flags() or MEGATRON_FLAGS.find(habit)]
    assert nearest_names("--learning-rate", KNOWN) == [], "nothing that is not known"


def test_unknown_flag_hands_back_its_suggestions():
    problem, names = unknown_flag("--seq-lenght", [], KNOWN)
    assert names == ["--seq-length"]
    assert problem.change == "did you mean --seq-length?"


def test_every_flag_with_a_value_has_a_shape():
    for cls in config_classes().values():
        for flag in flags_of(cls):
            assert flag.is_switch or value_shape(flag)


def test_only_flags_that_are_taken_are_suggested():
    """--tp-comm-overlap is Megatron's and refused; --no-overlap-p2p-communication is taken."""
    (problem,) = parse(["--tp-comm-overlaps"]).problems
    assert "--tp-comm" not in problem.change
    (problem,) = parse(["--no-overlap-p2p-communications"]).problems
    assert problem.change.startswith("did you mean --no-overlap-p2p-communication")
