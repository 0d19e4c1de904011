"""The argument dump in Megatron's look, and --help."""

from __future__ import annotations

import re

from megatron.core.config.fields import flags_of
from megatron.training.cli.dump import argument_dump, help_text, wants_help
from megatron.training.config.run import RunConfig, config_classes
from tests.support.settings import given


def test_dump_has_megatrons_shape():
    lines = argument_dump(given("--data-path", "a", "b"), {"world_size": 4, "Zebra": 1}).splitlines()
    assert lines[0] == "-" * 24 + " arguments " + "-" * 24
    assert lines[-1] == "-" * 20 + " end of arguments " + "-" * 21
    body = lines[1:-1]
    assert body == sorted(body, key=str.lower)
    assert "  hidden_size ..................................... 64" in body
    assert "  data_path ....................................... ['a', 'b']" in body
    assert "  world_size ...................................... 4" in body
    assert {line.index(".. ") for line in body} == {len("  ") + 47}


def test_dump_uses_the_names_of_the_flags_and_shows_every_setting():
    text = argument_dump(RunConfig())
    for name in ("num_experts", "norm_epsilon", "add_bias_linear", "pad_vocab_size"):
        assert f"\n  {name} ." in text
    settings = sum(len(flags_of(cls)) for cls in config_classes().values())
    assert len(text.splitlines()) == settings + 2


def test_help_shows_every_spelling_and_text():
    text = help_text("pretrain_hybrid.py")
    words = " ".join(text.split())
    for cls in config_classes().values():
        for flag in flags_of(cls):
            assert all(spelling in text for spelling in flag.spellings)
            assert flag.help in words
    assert max(map(len, text.splitlines())) <= 120


def test_help_says_what_a_flag_does_as_it_is_typed():
    words = " ".join(help_text("pretrain_hybrid.py").split())
    for said in (
        "--disable-bias-linear Switches off: bias in the linear layers",
        "--disable-mmap-bin-files Switches off: mapping .bin files",
        "--no-save-optim Switches off: moments and step count in checkpoints",
        "--bf16 Compute in bfloat16",
    ):
        assert said in words
    flags = [flag for cls in config_classes().values() for flag in flags_of(cls)]
    assert [f.name for f in flags if f.help.startswith("Switches off: ") != (f.is_switch and f.default is True)] == []
    # "Without it" would be the flag to one reader, and what it switches off to another.
    assert [f.name for f in flags if f.negates and re.search(r"[Ww]ithout (it|them)\b", f.help)] == []


def test_help_is_asked_for_by_two_spellings():
    assert wants_help(["--lr", "1", "--help"]) and wants_help(["-h"])
    assert not wants_help(["--lr", "1"])
