"""A checkpoint of one layout on another: the same content after load and re-save, the same steps after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.facts import read_facts
from megatron.core.dist_checkpointing.stored import StoredCheckpoint
from megatron.determinism.checkpoint import diff_checkpoints
from megatron.determinism.compare import compare
from tests.support.legs import finished, run_legs

# Legs in fresh processes: seconds where nothing else runs, minutes where much does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PP2 = "--pipeline-model-parallel-size 2"
PP3 = "--pipeline-model-parallel-size 3"
CUT = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
NEW = "--new-logical-layout"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"


def saved(folder: Path, ranks: int, words: str = "", *, steps: int = 2) -> Path:
    """A run that stops after some steps and saves."""
    finished(ranks, f"{words} --save {folder} --save-interval 100 --exit-interval {steps}")
    return folder


def resaved(source: Path, folder: Path, ranks: int, words: str = "") -> Path:
    """The checkpoint loaded and saved again without a step: the run counts as finished."""
    override = "--train-iters 2 --use-checkpoint-opt-param-scheduler --lr-warmup-iters 0"
    out = finished(ranks, f"{words} {override} --load {source} --save {folder} --save-interval 100")
    assert "successfully loaded checkpoint" in out
    return folder


def require_same(left: Path, right: Path) -> None:
    """The same content, but for generators, which no other layout can take over."""
    outcome = diff_checkpoints(left, right)
    different = [name for name in outcome.facts["differences"] if not name.startswith("generators.")]
    assert not different, outcome


def test_pipelines_and_optimizers_in_a_chain(tmp_path: Path) -> None:
    """Names are global: no pipeline, virtual pipeline or cut of the state shows in what is stored."""
    first = saved(tmp_path / "0", 2, "--bf16")
    chain = [
        (4, f"{PP2} --hybrid-layer-pattern M|*|E|-"),
        (4, f"{PP2} {CUT}"),
        (1, CUT),
        (3, f"{PP3} --hybrid-layer-pattern M|*|E-"),
        (2, f"{CUT} {EP2} {NEW}"),
        (2, ""),
    ]
    before = first
    for number, (ranks, words) in enumerate(chain, 1):
        new = f" {NEW}" if number == len(chain) else ""
        after = resaved(before, tmp_path / str(number), ranks, f"--bf16 {words}{new}")
        require_same(first, after)
        before = after


def test_steps_go_on_alike_on_another_pipeline_and_data_parallel_size(tmp_path: Path) -> None:
    words = "--bf16 --hidden-dropout 0.1"
    straight = tmp_path / "straight"
    finished(2, f"{words} --fingerprint-dir {straight} --save {tmp_path}/end --save-interval 100")
    for name, legs in {
        "pipeline": [(2, ""), (4, f"{PP2} {CUT} {OVERLAP}"), (4, f"{PP2} --hybrid-layer-pattern M|*|E|-")],
        "data": [(2, f"{CUT} {OVERLAP}"), (1, "")],
    }.items():
        folder, going_on = tmp_path / name, ""
        for number, (ranks, layout) in enumerate(legs, 1):
            until = f"--exit-interval {2 * number}" if number < len(legs) else ""
            places = f"--fingerprint-dir {folder}/fingerprint --save {folder}/checkpoints --save-interval 100"
            out = finished(ranks, f"{words} {layout} {going_on} {until} {places}")
            moved = bool(going_on) and ranks != legs[number - 2][0]
            assert ("random generators of all ranks are as the seed sets them" in out) == moved
            going_on = f"--load {folder}/checkpoints --exit-on-missing-checkpoint"
        outcome = compare(straight, folder / "fingerprint")
        assert outcome.exit == 0, outcome
        assert outcome.facts["common_iterations"] == 8
        require_same(tmp_path / "end", folder / "checkpoints")


def test_every_data_parallel_size_reads_every_other(tmp_path: Path) -> None:
    """Uneven cuts, ranks that hold nothing but padding, another logical size each time: no padding reaches a file."""
    tiny = f"--hidden-size 16 --kv-channels 4 --mamba-num-heads 4 --mamba-head-dim 8 {CUT} --global-batch-size 24"
    first = before = saved(tmp_path / "0", 1, tiny)
    for number, ranks in enumerate((3, 4, 2, 1), 1):
        after = resaved(before, tmp_path / str(number), ranks, f"{tiny} {NEW}")
        require_same(first, after)
        before = after
    sizes = {key: StoredCheckpoint(first).tensor(key).numel for key in read_facts(first / "iter_0000002")["tensors"]}
    assert sizes["main_params.decoder.final_norm.weight"] == 16


def test_experts_are_all_there_once_whatever_the_expert_parallel_size(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", 2, EP2)
    stored = StoredCheckpoint(one)
    keys = [key for key in stored.facts["tensors"] if key.startswith("main_params.") and ".experts." in key]
    assert len(keys) == 2
    for key in keys:
        facts = stored.tensor(key)
        assert facts.shards == facts.shape[0] == 4
        experts = stored.values(key).view(4, -1)
        assert len({tuple(expert.tolist()) for expert in experts}) == 4
    composite = resaved(one, tmp_path / "composite", 4, f"{EP2} {PP2} {CUT}")
    require_same(one, composite)
    alone = resaved(composite, tmp_path / "alone", 4, f"--expert-model-parallel-size 4 {NEW}")
    require_same(one, alone)
    require_same(one, resaved(alone, tmp_path / "whole", 1, NEW))


def test_dense_shards_are_all_there_where_more_tensor_than_expert_ranks_write(tmp_path: Path) -> None:
    """Two ranks cut the dense weights; both hold every expert whole."""
    first = saved(tmp_path / "first", 2, TP2)
    again = resaved(first, tmp_path / "again", 2, f"{TP2} {CUT}")
    assert diff_checkpoints(first, again).exit == 0


def test_masters_are_stored_in_fp32_bits(tmp_path: Path) -> None:
    stored = StoredCheckpoint(saved(tmp_path, 1, "--bf16 --lr 1e-5"))
    values = stored.values("main_params.decoder.layers.0.mixer.in_proj.weight")
    assert values.dtype == torch.float32
    assert (values.view(torch.int32) & 0xFFFF).count_nonzero() > 0.9 * values.numel()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two data-parallel ranks."""
    return saved(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (2, TP2, "another logical layout than"),
        (2, EP2, "--expert-model-parallel-size (ep 1), or --new-logical-layout"),
        (4, "", "or --new-logical-layout"),
    ],
)
def test_another_logical_layout_is_refused_with_both(two: Path, ranks: int, words: str, expected: str) -> None:
    for rank in run_legs(ranks, f"{words} --load {two}"):
        assert rank.code == 2
        assert expected in rank.error
        assert "the checkpoint's is tp 1, etp 1" in rank.error
        assert "this run's is tp" in rank.error
