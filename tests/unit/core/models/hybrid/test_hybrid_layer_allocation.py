"""The pattern language: real patterns, stages, and what is refused with which reason."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    assign_segments,
    parse_pattern,
    pattern_problems,
)

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (NANO, {"M": 23, "*": 6, "-": 0, "E": 23}),
        (NANO + "/*E/*E", {"M": 23, "*": 8, "-": 0, "E": 25}),
        ("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", {"M": 24, "*": 4, "-": 24, "E": 0}),
        ("MEM|EM*|/*E", {"M": 3, "*": 2, "-": 0, "E": 3}),
    ],
)
def test_layers_are_counted(text: str, counts: dict[str, int]) -> None:
    pattern = parse_pattern(text)
    assert {symbol: pattern.count(symbol) for symbol in counts} == counts
    assert pattern.num_layers == sum(counts.values()) - len("".join(pattern.mtp))


def test_interleaved_stages() -> None:
    pattern = parse_pattern("M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M-")
    segments = assign_segments(pattern, 2)
    assert [(s.pp_rank, s.vp_stage) for s in segments] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [s.first_layer for s in segments] == [0, 11, 22, 33]
    assert [s.is_first for s in segments] == [True, False, False, False]
    assert [s.is_last for s in segments] == [False, False, False, True]


def test_empty_segments_are_stages() -> None:
    segments = assign_segments(parse_pattern("|M*|"), 3)
    assert [(s.symbols, s.first_layer) for s in segments] == [("", 0), ("M*", 0), ("", 2)]
    assert segments[0].is_first
    assert segments[2].is_last


def test_without_pipes_layers_are_cut_evenly() -> None:
    segments = assign_segments(parse_pattern("ME*EM-"), 3)
    assert [(s.symbols, s.first_layer) for s in segments] == [("ME", 0), ("*E", 2), ("M-", 4)]


def test_trailing_slash_is_no_prediction_part() -> None:
    assert parse_pattern("M*/").mtp == ()
    assert parse_pattern("/M/M").mtp == ("M", "M")


@pytest.mark.parametrize(
    ("text", "pp", "words"),
    [
        ("M?M", 1, "'?' as character 2"),
        ("MG", 1, "Gated DeltaNet"),
        ("MD", 1, "DeepSeek"),
        ("M+", 1, "multi-latent"),
        ("", 1, "at least one layer"),
        ("|", 1, "at least one layer"),
        ("M|*|E", 2, "3 segments"),
        ("M*E", 2, "3 layers"),
        ("M/*E/*", 1, "equal parts behind each /, there are * and *E"),
        ("M/*|E", 1, "no |"),
        ("M/*E//*E", 1, "behind each /"),
    ],
)
def test_refusals_name_the_reason(text: str, pp: int, words: str) -> None:
    problems = pattern_problems(text, pp)
    assert any(words in str(problem) for problem in problems)
    assert all("--hybrid-layer-pattern" in str(problem) for problem in problems)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pattern("MG?/M/E")
    assert len(caught.value.problems) == 3


def test_stages_are_refused_when_cut_too() -> None:
    with pytest.raises(ConfigError, match="3 segments"):
        assign_segments(parse_pattern("M|*|E"), 2)
