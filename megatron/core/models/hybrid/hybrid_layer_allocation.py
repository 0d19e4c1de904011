"""The hybrid pattern language: which layers a model has, and which pipeline stage holds which of them. Pure.

pattern := main [ "/" mtp ]*       every mtp part the same; one part per prediction depth
main    := segment [ "|" segment ]*
segment := layer*                  an empty segment is a stage with the embedding or the head alone
layer   := M | * | - | E
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.errors import ConfigError, Problem

MAMBA, ATTENTION, DENSE, MOE = "M", "*", "-", "E"

LAYER_SYMBOLS = {
    MAMBA: "Mamba-2 mixer",
    ATTENTION: "self-attention",
    DENSE: "MLP",
    MOE: "mixture of experts",
}
"""Layers a pattern may hold, by symbol."""

REFUSED_SYMBOLS = {
    "G": "Gated DeltaNet layers have no deterministic op here yet",
    "D": "DeepSeek sparse attention has no deterministic op here yet",
    "+": "multi-latent attention is not implemented here; * is grouped-query attention",
}
"""Megatron's other symbols, each with the reason it is refused."""

FLAG = "--hybrid-layer-pattern"


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPattern:
    """A parsed pattern.

    ``segments`` are the pieces of the main part between pipes (one piece without pipes), ``mtp`` the layers of each
    multi-token-prediction part.
    """

    segments: tuple[str, ...]
    mtp: tuple[str, ...] = ()

    @property
    def layers(self) -> str:
        """Symbols of the main part, without pipes."""
        return "".join(self.segments)

    @property
    def num_layers(self) -> int:
        """Layers of the main part."""
        return len(self.layers)

    @property
    def has_pipes(self) -> bool:
        """True where the pattern itself says where stages begin."""
        return len(self.segments) > 1

    def count(self, symbol: str) -> int:
        """Layers of one kind, those of all multi-token-prediction parts included."""
        return self.layers.count(symbol) + "".join(self.mtp).count(symbol)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive layers that one pipeline rank runs as one chunk.

    ``index`` counts segments in model order and is ``vp_stage * PP + pp_rank``; ``first_layer`` is the global 0-based
    number of the first of ``symbols``.
    """

    index: int
    symbols: str
    first_layer: int
    pp_rank: int
    vp_stage: int
    is_first: bool
    is_last: bool


def _symbol_problems(text: str) -> list[Problem]:
    problems = []
    for symbol in dict.fromkeys(text):
        if symbol in LAYER_SYMBOLS or symbol in "|/":
            continue
        known = ", ".join(f"{s} ({name})" for s, name in LAYER_SYMBOLS.items())
        reason = REFUSED_SYMBOLS.get(symbol)
        needed = f"layers among {known}" + (f"; {reason}" if reason else "")
        place = text.index(symbol) + 1
        problems.append(Problem(f"{FLAG} {text!r} with {symbol!r} as character {place}", needed, FLAG))
    return problems


def _mtp_problems(text: str, parts: list[str]) -> list[Problem]:
    if not any(parts):
        return []
    problems = []
    if any("|" in part for part in parts):
        problems.append(
            Problem(f"{FLAG} {text!r}", "no | behind the first /: MTP parts run on the last stage", "remove that |")
        )
    if "" in parts:
        problems.append(
            Problem(f"{FLAG} {text!r}", "at least one layer in every part behind a /", "remove the surplus /")
        )
    if len(set(parts)) > 1:
        found = " and ".join(sorted(set(parts)))
        problems.append(Problem(f"{FLAG} {text!r}", f"equal parts behind each /, there are {found}", FLAG))
    return problems


def _stage_problems(segments: tuple[str, ...], pipeline_size: int) -> list[Problem]:
    given = f"{FLAG} {'|'.join(segments)!r} with --pipeline-model-parallel-size {pipeline_size}"
    layers = len("".join(segments))
    if len(segments) > 1 and len(segments) % pipeline_size:
        needed = f"a number of segments that the pipeline size divides; the pattern has {len(segments)} segments"
        return [Problem(given, needed, "the number of | or --pipeline-model-parallel-size")]
    if len(segments) == 1 and layers % pipeline_size:
        needed = f"a number of layers that the pipeline size divides; the pattern has {layers} layers and no |"
        return [Problem(given, needed, "mark the stages with | in the pattern, or --pipeline-model-parallel-size")]
    return []


def pattern_problems(text: str, pipeline_size: int = 1) -> list[Problem]:
    """Why the pattern cannot be run over ``pipeline_size`` pipeline ranks; empty when it can."""
    main, *parts = text.split("/")
    problems = _symbol_problems(text) + _mtp_problems(text, parts)
    if not main.replace("|", "") and not any(parts):
        problems.append(Problem(f"{FLAG} {text!r}", "at least one layer", FLAG))
    return problems + _stage_problems(tuple(main.split("|")), pipeline_size)


def parse_pattern(text: str) -> HybridPattern:
    """The parsed pattern.

    Raises:
        ConfigError: unknown or refused symbols, no layers, or unequal MTP parts.
    """
    problems = pattern_problems(text)
    if problems:
        raise ConfigError(problems)
    main, *parts = text.split("/")
    return HybridPattern(segments=tuple(main.split("|")), mtp=tuple(part for part in parts if part))


def assign_segments(pattern: HybridPattern, pipeline_size: int) -> tuple[Segment, ...]:
    """Every segment in model order with the pipeline rank and virtual stage that run it.

    A pattern without pipes is cut into ``pipeline_size`` equal pieces.

    Raises:
        ConfigError: the pipeline size divides neither the segments nor, without pipes, the layers.
    """
    if problems := _stage_problems(pattern.segments, pipeline_size):
        raise ConfigError(problems)
    pieces = pattern.segments
    if not pattern.has_pipes:
        length = pattern.num_layers // pipeline_size
        pieces = tuple(pattern.layers[i * length : (i + 1) * length] for i in range(pipeline_size))
    segments, first_layer = [], 0
    for index, symbols in enumerate(pieces):
        segments.append(
            Segment(
                index=index,
                symbols=symbols,
                first_layer=first_layer,
                pp_rank=index % pipeline_size,
                vp_stage=index // pipeline_size,
                is_first=index == 0,
                is_last=index == len(pieces) - 1,
            )
        )
        first_layer += len(symbols)
    return tuple(segments)
