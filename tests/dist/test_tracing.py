"""Traced training: no bit changes at any level, every level shows what it promises, ranks name transfers alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron.core.config.errors import ConfigError, TrainingStoppedError
from megatron.core.digest.bits import digest_hex
from megatron.core.pipeline_parallel.execute import _Executor
from megatron.core.process_groups.probed import ProbedSums
from megatron.core.trace.format import LEVELS, Event, decode_event, trace_file
from megatron.core.trace.probed_stage import ProbedStage
from megatron.determinism.trace_compare import trace_compare
from megatron.determinism.trace_read import open_folder
from megatron.training.loop.fingerprints import run_manifest
from megatron.training.loop.pretrain import run_training
from tests.support.ranks import run_ranks
from tests.support.training import build_here

SMALL = " --seq-length 32 --max-position-embeddings 32 --global-batch-size 2"
LAYOUTS = {
    "tp_ep": "--hybrid-layer-pattern ME --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1" + SMALL,
    "pp": "--hybrid-layer-pattern M|* --pipeline-model-parallel-size 2" + SMALL,
}


@dataclass(frozen=True)
class Seen:
    """What one run left on one rank."""

    norms: list[str]
    digests: dict[str, str]
    stages: set[str]
    sums: str


def train_traced(flags: str, folder: str | None, level: str) -> Seen:
    """Two steps, traced into ``folder`` where there is one."""
    run = build_here(flags + (f" --trace-dir {folder} --trace-level {level} --trace-iterations 2" if folder else ""))
    if run.tracing is not None:
        run.tracing.open(run_manifest(run, 0))
    reader, consumed, norms = run.reader(run.splits.train), 0, []
    for iteration in (1, 2):
        metrics = run.step.run(reader, iteration, consumed)
        consumed = metrics.consumed_samples
        norms.append(metrics.grad_norm.hex())
    if run.tracing is not None:
        run.tracing.close()
    digests = {name: digest_hex(total) for name, total in run.step.optimizer.state_digests().items()}
    return Seen(norms, digests, {type(c).__name__ for c in run.step.chunks}, type(run.step.ddp.sums).__name__)


def train_all(folder: str) -> dict[tuple[str, str | None], Seen]:
    """Rank function: every layout untraced and at every level."""
    seen = {}
    for name, flags in LAYOUTS.items():
        seen[name, None] = train_traced(flags, None, "")
        for level in LEVELS:
            seen[name, level] = train_traced(flags, f"{folder}/{name}_{level}", level)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The folder of the traces, and what every rank saw."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_ranks(2, train_all, str(folder), timeout_s=400)


def events(folder: Path, rank: int) -> list[Event]:
    return [decode_event(raw) for segment in open_folder(folder).stream(rank).segments() for raw in segment.events]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tracing_changes_no_bit(runs: tuple[Path, list[dict]], layout: str):
    for rank in runs[1]:
        plain = rank[layout, None]
        for level in LEVELS:
            assert rank[layout, level].norms == plain.norms, level
            assert rank[layout, level].digests == plain.digests, level


def test_untraced_run_has_no_probe(runs: tuple[Path, list[dict]]):
    plain, traced = runs[1][0]["tp_ep", None], runs[1][0]["tp_ep", "module"]
    assert ProbedStage.__name__ not in plain.stages
    assert plain.sums != ProbedSums.__name__
    assert traced.stages == {ProbedStage.__name__}
    assert traced.sums == ProbedSums.__name__


@pytest.mark.parametrize("layout", LAYOUTS)
def test_levels_add_to_one_another(runs: tuple[Path, list[dict]], layout: str):
    kinds = {level: {e.kind for e in events(runs[0] / f"{layout}_{level}", 0)} for level in LEVELS}
    assert {"state", "input", "collective", "stage"} <= kinds["semantic"]
    assert "op" not in kinds["module"]
    assert "module" in kinds["module"]
    assert {"op", "kernel"} <= kinds["op"]
    assert kinds["semantic"] <= kinds["module"] <= kinds["op"] <= kinds["kernel"]
    counts = {level: len(events(runs[0] / f"{layout}_{level}", 0)) for level in LEVELS}
    assert counts["semantic"] < counts["module"] < counts["op"] <= counts["kernel"]


def test_both_ends_give_a_transfer_one_name_and_one_digest(runs: tuple[Path, list[dict]]):
    sent, received = Counter(), Counter()
    for rank in (0, 1):
        for event in events(runs[0] / "pp_semantic", rank):
            if event.name == "exchange":
                sent.update((t.label, t.digest) for t in event.ins)
                received.update((t.label, t.digest) for t in event.outs)
    assert sent == received
    assert {label.rpartition(" ")[0] for label, _ in sent} == {"pp 0->1", "pp 1->0"}


def test_members_of_a_group_count_its_collectives_alike(runs: tuple[Path, list[dict]]):
    def numbered(rank: int) -> list:
        found = events(runs[0] / "tp_ep_semantic", rank)
        return [(e.name, e.meta["axis"], e.meta["seq"]) for e in found if e.kind in ("collective", "sum") and e.meta]

    assert numbered(0) == numbered(1)
    assert len(numbered(0)) > 10


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_recomputed_where_nothing_is_asked_to_be(runs: tuple[Path, list[dict]], level: str):
    inside = [e for e in events(runs[0] / f"tp_ep_{level}", 0) if e.phase == "backward" and e.kind == "collective"]
    assert any(e.scope.endswith(":reduce_scatter_rows") for e in inside)
    assert not any(e.phase == "recompute" for e in events(runs[0] / f"tp_ep_{level}", 0) if e.kind != "op")


def test_backward_has_scopes_of_the_forward(runs: tuple[Path, list[dict]]):
    scopes = {
        e.scope.partition("|")[0] for e in events(runs[0] / "tp_ep_op", 0) if e.kind == "op" and e.phase == "backward"
    }
    assert {"decoder.layers.0.mixer", "decoder.layers.1.mlp.router"} <= scopes


def test_state_of_every_parameter_is_there(runs: tuple[Path, list[dict]]):
    state = [e for e in events(runs[0] / "tp_ep_semantic", 0) if e.kind == "state"]
    names = {e.scope for e in state if e.name == "weights"}
    assert "decoder.layers.1.mlp.router.weight" in names
    assert names == {e.scope for e in state if e.name == "main_params"}
    assert {e.name for e in state} == {"weights", "expert_bias", "main_params", "exp_avg", "exp_avg_sq"}


def in_another_thread(backward: Callable) -> Callable:
    """The same in a thread of its own, with this thread's dispatch modes, as torch has a backward on a device."""

    def call(*args: object) -> object:
        modes = _get_current_dispatch_mode_stack()

        def work() -> object:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return backward(*args)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    return call


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_backward_in_another_thread_leaves_the_same_trace(level: str, tmp_path: Path):
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for name in ("here", "elsewhere"):
        flags = f"--hybrid-layer-pattern ME* {again} {SMALL} --trace-level {level} --trace-dir {tmp_path}/{name}"
        run = build_here(flags)
        run.tracing.open(run_manifest(run, 0))
        backward = _Executor.backward if name == "here" else in_another_thread(_Executor.backward)
        with mock.patch.object(_Executor, "backward", backward):
            run.step.run(run.reader(run.splits.train), 1, 0)
        run.tracing.close()
    here, there = ((tmp_path / name / trace_file(0)).read_bytes() for name in ("here", "elsewhere"))
    assert here == there
    assert {e.phase for e in events(tmp_path / "here", 0)} >= {"forward", "recompute", "backward"}


@pytest.mark.parametrize("level", ["op", "kernel"])
def test_other_data_are_named_as_such(level: str, tmp_path: Path):
    for consumed in (0, 2):
        flags = f"--hybrid-layer-pattern M- {SMALL} --trace-level {level} --trace-dir {tmp_path}/{consumed}"
        run = build_here(flags)
        run.tracing.open(run_manifest(run, 0))
        run.step.run(run.reader(run.splits.train), 1, consumed)
        run.tracing.close()
    before = {e.name for e in events(tmp_path / "0", 0) if e.phase == "state" and e.kind == "op"}
    assert before == {"aten.zero_.default"}, "gradients start from zero; reading is no event"
    facts = trace_compare(tmp_path / "0", tmp_path / "2").facts
    assert (facts["mechanism"], facts["first_difference"]["op"]) == ("data", "batch")


def watched_by_step(events: list[Event]) -> list[tuple]:
    """State and stages of a trace: identities and digests of what came out."""
    return [
        (e.kind, e.scope, e.name, e.meta.get("at"), *((t.label, t.digest) for t in e.outs))
        for e in events
        if e.kind in ("state", "stage")
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_step_digests_as_it_goes_is_what_a_reading_finds(runs: tuple[Path, list[dict]], layout: str):
    for rank in (0, 1):
        by_step, read = (watched_by_step(events(runs[0] / f"{layout}_{level}", rank)) for level in ("module", "op"))
        assert by_step == read
        (finished,) = [found for found in by_step if found[2] == "finalize_model_grads"]
        assert any(label.startswith("gradient of ") for label, _ in finished[4:])


def test_a_step_that_is_not_taken_shows_its_final_gradient(tmp_path: Path):
    def not_finite(**kwargs: object) -> None:
        raise TrainingStoppedError("planted")

    for name in ("taken", "stopped"):
        flags = f"--hybrid-layer-pattern M- {SMALL} --trace-level semantic --trace-dir {tmp_path}/{name}"
        run = build_here(flags)
        run.tracing.open(run_manifest(run, 0))
        if name == "stopped":
            run.step.optimizer.measured = not_finite
            with pytest.raises(TrainingStoppedError, match="planted"):
                run.step.run(run.reader(run.splits.train), 1, 0)
        else:
            run.step.run(run.reader(run.splits.train), 1, 0)
        run.tracing.close()
    taken, stopped = ([e for e in events(tmp_path / name, 0) if e.kind == "stage"] for name in ("taken", "stopped"))
    assert [e.name for e in taken] == ["finalize_model_grads", "optimizer_step"]
    assert stopped == taken[:1]
    assert len(stopped[0].outs) > 10
    assert stopped[0].ins == stopped[0].outs, "one rank: nothing is added or divided, so nothing is read twice"


def test_used_folder_is_refused(runs: tuple[Path, list[dict]]):
    folder = runs[0] / "tp_ep_semantic"
    before = (folder / trace_file(0)).stat().st_size
    with pytest.raises(ConfigError, match="another --trace-dir"):
        train_traced("--hybrid-layer-pattern M" + SMALL, str(folder), "semantic")
    assert (folder / trace_file(0)).stat().st_size == before


def train_and_save(folder: str) -> None:
    """Rank function: two iterations, saved, and a run that goes on from there; both traced, with recomputation."""
    flags = f"{LAYOUTS['tp_ep']} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    flags += f"--save {folder}/checkpoints --save-interval 2 --train-iters 3 --eval-iters 0 --trace-level semantic "
    for name, more in (("first", "--exit-interval 2"), ("second", f"--load {folder}/checkpoints --async-save")):
        run_training(build_here(f"{flags} --trace-dir {folder}/{name} {more}"), time.monotonic())


def test_semantic_level_shows_what_moves_state_between_ranks_and_runs(tmp_path: Path):
    run_ranks(2, train_and_save, str(tmp_path))
    first, second = events(tmp_path / "first", 0), events(tmp_path / "second", 0)
    assert {"state", "input", "collective", "sum", "stage", "checkpoint"} <= {e.kind for e in first}
    assert {"forward", "recompute", "backward", "optimizer", "checkpoint", "state"} == {e.phase for e in first}
    assert {"finalize_model_grads", "optimizer_step"} == {e.name for e in first if e.kind == "stage"}
    assert {"all_reduce", "reduce_scatter_rows"} <= {e.name for e in first if e.kind == "sum"}
    by_phase = {phase: [e for e in first if e.phase == phase] for phase in ("forward", "recompute", "backward")}
    assert {e.scope.partition(":")[0] for e in by_phase["recompute"]} == {"|_AgainBackward"}
    assert not any("_AgainBackward" in e.scope for e in by_phase["backward"])
    routed = {phase: sum(e.name == "sum_integers" for e in found) for phase, found in by_phase.items()}
    assert routed["recompute"] == routed["forward"] > routed["backward"] == 0
    saved = [e for e in first if e.kind == "checkpoint"]
    assert [e.name for e in saved] == ["save_started", "save_finished"]
    (loaded, *later) = [e for e in second if e.kind == "checkpoint"]
    assert [e.name for e in (loaded, *later)] == ["loaded", "save_started", "save_finished"]
    digests = [
        {t.label: t.digest for t in e.outs if not t.label.startswith("rng")} for e in (saved[0], loaded, later[0])
    ]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) > 10
