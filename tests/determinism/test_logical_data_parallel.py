"""One trajectory on any data-parallel size that divides the logical one, and on any pipeline: every bit, every step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from tests.determinism.trajectories import NOISY, Seen, trajectories
from tests.support.ranks import run_ranks
from tests.support.training import TIED, TINY

# The first test of a world trains for all of them.
pytestmark = pytest.mark.timeout(400)
LIMIT_S = 360.0
STEPS = 2
PIPELINE, FOUR_STAGES = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
DISTRIBUTED = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"

PLAIN = "ME*EM-"
MTP = "ME*-/*E"
CUT = {PLAIN: (PLAIN, "ME*|EM-", "M|E*|EM|-"), "ME*E": ("ME*E", "ME|*E"), MTP: (MTP, "ME*|-/*E", "M|E|*|-/*E")}


@dataclass(frozen=True)
class Recipe:
    """A logical layout and what is trained under it, with so many ``microbatches`` a shard; ``dp`` 1 .. and ``pp`` are
    left to the cells."""

    name: str
    flags: str
    ldp: int
    pattern: str = "ME*E"
    base: str = TINY
    microbatches: int = 1


@dataclass(frozen=True)
class Cell:
    """One physical layout of a recipe."""

    recipe: Recipe
    world: int
    flags: str = ""
    segments: int = 0
    slow: bool = False

    @property
    def command(self) -> str:
        """Flags on top of the tiny model's."""
        pattern = CUT[self.recipe.pattern][self.segments]
        return (
            f"{NOISY} {self.recipe.flags} {self.flags} --hybrid-layer-pattern {pattern!r} "
            f"--logical-data-parallel-size {self.recipe.ldp} "
            f"--global-batch-size {self.recipe.microbatches * self.recipe.ldp}"
        )


FOUR = Recipe("ldp4-fp32", "", 4, PLAIN, microbatches=2)
SIX = Recipe("ldp6-bf16", "--bf16", 6)
BLOCKS = Recipe("ldp4-bf16-block2", "--bf16 --logical-reduce-block-size 2", 4)
EXPERTS = Recipe("ldp4-ep2", "--expert-model-parallel-size 2 --logical-reduce-block-size 2", 4)
SHARED = Recipe("ldp4-tied-mtp-bf16", "--bf16", 4, MTP, TIED, microbatches=2)
TENSOR = Recipe("ldp4-tp2-ep2-bf16", f"--bf16 --expert-model-parallel-size 2 {TP2}", 4)
EIGHT = Recipe("ldp8-bf16-block4", "--bf16 --logical-reduce-block-size 4", 8)

# The first cell of a recipe is what the others are compared with.
CELLS = (
    Cell(FOUR, 4, DISTRIBUTED),
    Cell(FOUR, 2),
    Cell(FOUR, 1, DISTRIBUTED),
    Cell(FOUR, 4, f"{PIPELINE} {DISTRIBUTED}", segments=1),
    Cell(FOUR, 2, PIPELINE, segments=2),
    Cell(SIX, 3),
    Cell(SIX, 2, f"{DISTRIBUTED} --ddp-bucket-size 1"),
    Cell(SIX, 1),
    Cell(BLOCKS, 4),
    Cell(BLOCKS, 2, f"{DISTRIBUTED} --ddp-num-buckets 3"),
    Cell(BLOCKS, 1, DISTRIBUTED),
    Cell(EXPERTS, 4, DISTRIBUTED),
    Cell(EXPERTS, 2),
    Cell(SHARED, 4),
    Cell(SHARED, 2, DISTRIBUTED),
    Cell(SHARED, 2, PIPELINE, segments=2),
    Cell(SHARED, 4, f"{FOUR_STAGES} {DISTRIBUTED}", segments=2),
    Cell(TENSOR, 4, DISTRIBUTED),
    Cell(TENSOR, 2),
    Cell(TENSOR, 4, f"{PIPELINE} {DISTRIBUTED}", segments=1),
    Cell(EIGHT, 4, DISTRIBUTED),
    Cell(EIGHT, 2),
    # More of the same: what each adds to the cells above is a number of ranks or stages.
    Cell(FOUR, 4, FOUR_STAGES, segments=2, slow=True),
    Cell(SIX, 6, DISTRIBUTED, slow=True),
    Cell(SHARED, 4, f"{PIPELINE} {DISTRIBUTED}", segments=1, slow=True),
    Cell(SHARED, 8, FOUR_STAGES, segments=2, slow=True),
    Cell(TENSOR, 8, slow=True),
    Cell(EIGHT, 1, DISTRIBUTED, slow=True),
    Cell(EIGHT, 4, f"{PIPELINE} {DISTRIBUTED}", segments=1, slow=True),
    Cell(EIGHT, 8, DISTRIBUTED, slow=True),
)


@functools.cache
def _all_of(world: int, slow: bool) -> dict[Cell, list[list[Seen]]]:
    """Every cell of a world that is slow or is not, by rank; the ranks are started once."""
    cells = [cell for cell in CELLS if (cell.world, cell.slow) == (world, slow)]
    of_ranks = run_ranks(
        world, trajectories, [(cell.recipe.base, cell.command) for cell in cells], STEPS, timeout_s=LIMIT_S
    )
    return {cell: [of_rank[i] for of_rank in of_ranks] for i, cell in enumerate(cells)}


def _of(cell: Cell) -> list[list[Seen]]:
    return _all_of(cell.world, cell.slow)[cell]


def _first_of(recipe: Recipe) -> Cell:
    return next(cell for cell in CELLS if cell.recipe is recipe)


def _name(cell: Cell) -> str:
    return f"{cell.recipe.name}-on-{cell.world}-{cell.segments}"


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=_name(c), marks=[pytest.mark.slow] if c.slow else []) for c in CELLS]
)
def test_one_trajectory(cell: Cell) -> None:
    want, (first, *others) = _of(_first_of(cell.recipe))[0], _of(cell)
    assert all(other == first for other in others), "ranks disagree"
    for step, (mine, theirs) in enumerate(zip(first, want, strict=True), 1):
        assert mine.state == theirs.state, step
        shared = mine.numbers.keys() & theirs.numbers.keys()
        assert {"lm loss"} <= shared
        assert {k: mine.numbers[k] for k in shared} == {k: theirs.numbers[k] for k in shared}, step


def test_state_moves_and_recipes_differ() -> None:
    """The control: the digests that agree above are not constants."""
    firsts = [_of(_first_of(recipe))[0] for recipe in (FOUR, EXPERTS, BLOCKS)]
    digests = [seen.state["main_params"] for first in firsts for seen in first[:STEPS]]
    assert len(set(digests)) == len(digests)
