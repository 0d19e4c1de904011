"""Every common source of runs that differ, planted into one of two runs, is found and called by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.determinism.report import Exit, Outcome
from megatron.determinism.trace_compare import trace_compare
from tests.support.planted import FAULTS, run_planted
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

FLAGS = (
    "--hybrid-layer-pattern M*E --global-batch-size 2 --expert-model-parallel-size 2 --seq-length 32 "
    "--max-position-embeddings 32 "
)
IN_ONE_STEP = f"{FLAGS} --trace-level kernel --trace-iterations 2"
IN_A_STRETCH = f"{FLAGS} --trace-level semantic --trace-iterations 1:2"
"""The fault strikes between two steps that are both traced, at the lowest level."""

EXPECTED = {
    "autotuning": ("candidate_origin", [1], "rms_norm"),
    "unordered_sum": ("candidate_origin", [0, 1], "planted.fused_aux_loss"),
    "generator_state": ("candidate_origin", [0, 1], "aten.rand"),
    "library_kernel": ("candidate_origin", [0], "aten.mm"),
    "rebuilt_weight": ("outside_capture", [0, 1], "weights"),
    "communication_path": ("candidate_origin", [0, 1], "all_to_all"),
    "uninitialised_read": ("candidate_origin", [0, 1], "aten.mul"),
    "race": ("outside_capture", [0, 1], ""),
    "permuted_dispatch": ("candidate_origin", [0, 1], "moe_permute"),
    "replica_drift": ("outside_capture", [1], "weights"),
}


def run_all(folder: str) -> None:
    """Rank function: every fault in a run where it strikes and one where it does not, and two runs without a fault."""
    for name, fault in [*FAULTS.items(), ("none", None)]:
        for run in "ab":
            run_planted(Path(folder) / name / run, IN_ONE_STEP, fault, strikes=run == "b")
            if fault is not None and EXPECTED[name][2] == "weights":
                run_planted(Path(folder) / f"{name}.stretch" / run, IN_A_STRETCH, fault, strikes=run == "b")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace folders by fault and run."""
    folder = tmp_path_factory.mktemp("planted")
    run_ranks(2, run_all, str(folder), timeout_s=600)
    return folder


def compared(traces: Path, name: str) -> Outcome:
    return trace_compare(traces / name / "a", traces / name / "b")


def test_runs_without_a_fault_do_not_differ(traces: Path):
    outcome = compared(traces, "none")
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.facts["common_events"] > 1000
    assert outcome.facts["extra_events"] == 0


@pytest.mark.parametrize("name", [*FAULTS, "rebuilt_weight.stretch", "replica_drift.stretch"])
def test_fault_is_found_and_named(traces: Path, name: str):
    outcome, name = compared(traces, name), name.partition(".")[0]
    kind, ranks, operation = EXPECTED[name]
    said = "\n".join([outcome.verdict, *outcome.details])
    assert outcome.exit == Exit.DIFFERENT, said
    assert outcome.facts["mechanism"] == name, said
    assert outcome.facts["first_difference"]["class"] == kind, said
    assert outcome.facts["origin_ranks"] == ranks, said
    assert outcome.facts["first_difference"]["op"].startswith(operation), said
    assert outcome.facts["first_difference"]["iteration"] == 2, said
    assert outcome.facts["extra_events"] == 0, said
    json.dumps(outcome.facts)


def test_rank_that_only_received_says_from_whom(traces: Path):
    findings = compared(traces, "autotuning").facts["first_mismatches"]
    (receiver,) = [f for f in findings if f["class"] == "downstream_receiver"]
    assert (receiver["rank"], receiver["from_ranks"]) == (0, [1])


def test_report_shows_the_spread(traces: Path):
    page = Path(compared(traces, "autotuning").facts["report"]).read_text("utf-8")
    assert "rank 1 of ranks 0, 1" in page
    assert "decoder.layers.2" in page
    assert "origin" in page
    assert "received" in page
