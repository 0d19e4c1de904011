"""--replay-check-interval: no bit moves where nothing is wrong; one flipped bit on one rank stops all and is named."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core.config.errors import ConfigError, TrainingStoppedError
from megatron.core.digest.bits import digest_hex
from megatron.core.ops.registry import OpTable, build_table
from megatron.determinism.report import Exit
from megatron.determinism.trace_compare import trace_compare
from megatron.training.cli.parser import parse_run_config
from megatron.training.config.validate import resolve_and_validate
from megatron.training.loop.build import Run
from megatron.training.loop.fingerprints import run_manifest
from megatron.training.setup.seeds import generator_digest
from tests.determinism.trajectories import NOISY
from tests.support.planted import change_memory, with_op
from tests.support.ranks import run_ranks
from tests.support.training import TINY, build_here

LAYOUTS = {
    "passes": f"--hybrid-layer-pattern ME*- --logical-data-parallel-size 4 --global-batch-size 8 {NOISY} "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "pp": f"--hybrid-layer-pattern ME|*- --pipeline-model-parallel-size 2 --global-batch-size 4 {NOISY}",
    "tp_ep": "--hybrid-layer-pattern ME* --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --global-batch-size 2 {NOISY}",
    "chunks_with_one_table": f"--hybrid-layer-pattern M|-/E --global-batch-size 2 {NOISY}",
}
CHECK = " --replay-check-interval 2"


def steps(flags: str, trace: str | None = None) -> list[tuple[str, ...]]:
    """Two steps: losses, norm, digests of the state, of router biases, of the generators and of the data."""
    run = build_here(flags + (f" --trace-dir {trace} --trace-level module --trace-iterations 2" if trace else ""))
    if run.tracing is not None:
        run.tracing.open(run_manifest(run, 0))
    reader, consumed, seen = run.reader(run.splits.train), 0, []
    for iteration in (1, 2):
        step = run.step.run(reader, iteration, consumed)
        consumed = step.consumed_samples
        seen.append((step.losses["lm loss"].hex(), step.grad_norm.hex(), *state(run), digest_hex(reader.take_digest())))
    if run.tracing is not None:
        run.tracing.close()
    return seen


def state(run: Run) -> tuple[str, ...]:
    """Digests of what a step moves, and of the generators."""
    digests = [digest_hex(total) for total in run.step.optimizer.state_digests().values()]
    biases = [str(r.expert_bias_E.tolist()) for chunk in run.chunks for r in chunk.balanced_routers()]
    return (*digests, *biases, generator_digest())


def with_and_without(flags: str) -> list:
    """Rank function."""
    return [steps(flags), steps(flags + CHECK)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_moves(layout: str):
    for plain, checked in run_ranks(2, with_and_without, LAYOUTS[layout]):
        assert len(set(plain)) == 2
        assert checked == plain


def traced(flags: str, folder: str) -> list:
    """Rank function."""
    return [steps(flags, f"{folder}/plain"), steps(flags + CHECK, f"{folder}/checked")]


def test_a_checked_step_is_traced_once(tmp_path: Path):
    for plain, checked in run_ranks(2, traced, LAYOUTS["pp"], str(tmp_path)):
        assert checked == plain
    outcome = trace_compare(tmp_path / "plain", tmp_path / "checked")
    assert outcome.exit == Exit.SAME, outcome
    assert outcome.facts["extra_events"] == 0
    assert outcome.facts["common_events"] > 100


@dataclass(frozen=True)
class Flip:
    """One bit of what an op leaves on ``rank``, in its ``call``-th call of iteration 2; ``argument`` is what it writes,
    ``None`` its result."""

    op: str
    rank: int
    call: int
    argument: int | None = None


STATE = SimpleNamespace(calls=0, armed=False)


def flipping(flip: Flip) -> Callable[..., OpTable]:
    """``build_table`` whose op strikes."""

    def make(original: Callable) -> Callable:
        def op(*args: object, **kwargs: object) -> object:
            out = original(*args, **kwargs)
            rank = dist.get_rank() if dist.is_initialized() else 0
            STATE.calls += STATE.armed
            if STATE.armed and rank == flip.rank and STATE.calls == flip.call:
                target = out if flip.argument is None else args[flip.argument]
                change_memory(target, target.numel() // 2)
            return out

        return op

    return lambda *args: with_op(build_table(*args), flip.op, make)


def struck(flags: str, flip: Flip | None) -> tuple[str, bool, int]:
    """Rank function: the message that ended step 2, whether the state is that before it, calls of the op in step 2."""
    STATE.calls, STATE.armed = 0, False
    with mock.patch("tests.support.training.build_table", flipping(flip) if flip else build_table):
        run = build_here(flags)
    reader = run.reader(run.splits.train)
    consumed = run.step.run(reader, 1, 0).consumed_samples
    before, message, STATE.armed = state(run), "", True
    try:
        run.step.run(reader, 2, consumed)
    except TrainingStoppedError as error:
        message = str(error)
    return message, state(run) == before and run.step.optimizer.step_count == 1, STATE.calls


PLANTED = {
    "gradient, second computation": ("passes", Flip("linear_grad", 1, -1, argument=0), "local_gradient"),
    "gradient, first computation": ("passes", Flip("linear_grad", 1, -2, argument=0), "local_gradient"),
    "forward": ("passes", Flip("rms_norm", 0, 2), "forward of decoder.layers"),
    "forward, passed on by the pipeline": ("pp", Flip("rms_norm", 0, 2), "forward of decoder.layers."),
    "experts, passed on to peers": ("tp_ep", Flip("grouped_gemm", 1, 2), "decoder.layers.1"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_flipped_bit_stops_all_and_is_named(name: str):
    layout, flip, place = PLANTED[name]
    flags = LAYOUTS[layout] + CHECK
    if flip.call < 0:
        # The last call of the second computation, or of the first: nothing is added to it any more.
        *_, calls = run_ranks(2, struck, flags, Flip(flip.op, -1, 0, flip.argument))[flip.rank]
        flip = Flip(flip.op, flip.rank, calls if flip.call == -1 else calls // 2, flip.argument)
    ranks = run_ranks(2, struck, flags, flip)
    messages = {message for message, *_ in ranks}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert "iteration 2: computed twice from the same state, the results differ" in message
    assert f"First on rank {flip.rank} on " in message, message
    assert f"rank {1 - flip.rank} on" not in message, message
    assert place in message, message
    assert all(unmoved for _, unmoved, _ in ranks)


def test_a_good_step_is_taken_and_an_unchecked_one_is_not_computed_twice():
    once = run_ranks(1, struck, LAYOUTS["passes"], Flip("linear_grad", -1, 0, 0))
    twice = run_ranks(1, struck, LAYOUTS["passes"] + CHECK, Flip("linear_grad", -1, 0, 0))
    assert once[0][:2] == twice[0][:2] == ("", False)
    assert twice[0][2] == 2 * once[0][2] > 0


def test_a_flip_without_the_check_goes_unseen():
    (message, unmoved, _), *_ = run_ranks(2, struck, LAYOUTS["passes"], Flip("linear_grad", 1, 80, argument=0))
    assert (message, unmoved) == ("", False)


def poisoned(flags: str) -> str:
    """Rank function: a loss that is not finite in both computations."""
    run = build_here(flags + CHECK)
    for chunk in run.chunks:
        for param in chunk.model_parameters():
            param.data.view(-1)[:1] = float("nan")
    with pytest.raises(TrainingStoppedError) as stopped:
        run.step.run(run.reader(run.splits.train), 2, 0)
    return str(stopped.value)


def test_what_is_not_finite_twice_is_no_corruption():
    for message in run_ranks(2, poisoned, LAYOUTS["pp"]):
        assert "twice" not in message
        assert "finite" in message or "nan" in message


def test_steps_that_may_differ_anyway_are_refused():
    words = shlex.split(TINY.replace("--deterministic-mode", "") + " --hybrid-layer-pattern M" + CHECK)
    with pytest.raises(ConfigError, match="--replay-check-interval 2 without --deterministic-mode"):
        resolve_and_validate(parse_run_config(words), 1)
