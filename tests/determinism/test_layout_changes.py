"""One trajectory through launches of other sizes: stopped, saved in either way, gone on with on fewer or more ranks and
on another pipeline. Every step's fingerprint and the last checkpoint are those of the run that never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.determinism.checkpoint import diff_checkpoints
from megatron.determinism.compare import compare
from tests.support.legs import finished, run_legs

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = pytest.mark.timeout(900)

EACH = 2
CUT, ASYNC = "--use-distributed-optimizer", "--async-save"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
NOISY = "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1"
TP2EP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
SHARED = "--no-untie-embeddings-and-output-weights"


@dataclass(frozen=True)
class Chain:
    """A recipe, and the (ranks, flags) of its launches; the first one's are also those of the run that never stops."""

    name: str
    flags: str
    ldp: int
    legs: tuple[tuple[int, str], ...]
    slow: bool = True

    @property
    def words(self) -> str:
        """The flags of every launch."""
        return (
            f"{NOISY} {self.flags} --logical-data-parallel-size {self.ldp} --global-batch-size {self.ldp} "
            f"--train-iters {EACH * len(self.legs)} --save-interval 100"
        )


CHAINS = (
    Chain("ldp6", "", 6, ((3, f"{CUT} {ASYNC}"), (1, CUT), (2, ASYNC)), slow=False),
    Chain("ldp6-all", "", 6, ((6, CUT), (3, ASYNC), (2, f"{CUT} {ASYNC}"), (1, ""))),
    Chain(
        "ldp8",
        "--logical-reduce-block-size 4",
        8,
        ((8, f"{CUT} {ASYNC}"), (4, ""), (4, f"{PP2} {CUT} --hybrid-layer-pattern M*|E-"), (1, ASYNC), (2, CUT)),
    ),
    Chain(
        "tied-mtp",
        SHARED,
        4,
        (
            (4, f"{CUT} --hybrid-layer-pattern M*E-/*E"),
            (4, f"{PP2} {CUT} {ASYNC} --hybrid-layer-pattern M*|E-/*E"),
            (4, f"{PP4} --hybrid-layer-pattern M|*|E|-/*E"),
            (2, f"{PP2} {ASYNC} --hybrid-layer-pattern M|*|E|-/*E"),
            (1, f"{CUT} --hybrid-layer-pattern M*E-/*E"),
        ),
    ),
    Chain(
        "tp2-ep2",
        f"{TP2EP2} --expert-model-parallel-size 2",
        4,
        ((8, f"{CUT} {ASYNC}"), (4, CUT), (2, ASYNC), (4, f"{PP2} --hybrid-layer-pattern M*|E-")),
    ),
)


def _legs(chain: Chain, folder: Path) -> Path:
    """Every launch, in fresh processes."""
    going_on = ""
    for number, (ranks, layout) in enumerate(chain.legs, 1):
        until = f"--exit-interval {EACH * number}" if number < len(chain.legs) else ""
        places = f"--fingerprint-dir {folder}/fingerprint --save {folder}/checkpoints"
        finished(ranks, f"{chain.words} {layout} {going_on} {until} {places}")
        going_on = f"--load {folder}/checkpoints --exit-on-missing-checkpoint"
    return folder


@pytest.mark.parametrize(
    "chain", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in CHAINS]
)
def test_one_trajectory_through_launches_of_other_sizes(tmp_path: Path, chain: Chain) -> None:
    ranks, layout = chain.legs[0]
    straight = tmp_path / "straight"
    places = f"--fingerprint-dir {straight}/fingerprint --save {straight}/checkpoints"
    finished(ranks, f"{chain.words} {layout} {places}")
    resumed = _legs(chain, tmp_path / "resumed")
    outcome = compare(straight / "fingerprint", resumed / "fingerprint")
    assert outcome.exit == 0, outcome
    assert outcome.facts["common_iterations"] == EACH * len(chain.legs)
    content = diff_checkpoints(straight / "checkpoints", resumed / "checkpoints").facts["differences"]
    assert not [name for name in content if not name.startswith("generators.")]


def test_a_size_that_does_not_divide_the_logical_one_is_refused(tmp_path: Path) -> None:
    """The control: six shards on four ranks have no passes; nothing is carried over silently."""
    chain = CHAINS[0]
    finished(2, f"{chain.words} --exit-interval 2 --save {tmp_path}/checkpoints")
    ended = run_legs(4, f"{chain.words} --load {tmp_path}/checkpoints")
    assert [rank.code for rank in ended] == [2] * 4
    assert "--logical-data-parallel-size" in ended[0].error
