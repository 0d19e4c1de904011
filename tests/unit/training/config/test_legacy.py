"""Megatron's flags that are no settings here: taken, taken with one value, or refused, each with a reason."""

from __future__ import annotations

import shlex

import pytest

from megatron.training.cli.parser import our_flags, parse
from megatron.training.config.legacy import FlagFamily, LegacyTable
from megatron.training.config.legacy_table import MEGATRON_FLAGS
from tests.support.settings import SMALL

# What a published recipe of a 30B hybrid model passes besides the flags that have a field.
RECIPE = """
    --use-mcore-models --enable-experimental --use-fused-weighted-squared-relu --attention-backend auto
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --no-create-attention-mask-in-dataloader
    --moe-permute-fusion --moe-router-fusion --overlap-grad-reduce --overlap-param-gather --manual-gc
    --manual-gc-interval 10 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --exp-avg-dtype fp32
    --no-rope-fusion --accumulate-allreduce-grads-in-fp32 --data-parallel-sharding-strategy optim_grads_params
    --moe-router-num-groups 1 --moe-router-group-topk 1 --ckpt-format torch_dist --timing-log-level 0
    --log-timers-to-tensorboard --log-memory-to-tensorboard --num-distributed-optimizer-instances 1
    --high-priority-stream-groups ep dp_cp --cp-comm-type a2a p2p --context-parallel-size 1 --rerun-mode disabled
"""


def refusals(*argv: str) -> list[str]:
    return [str(problem) for problem in parse(argv).problems]


def test_no_flag_has_two_fates():
    assert not [spelling for spelling in our_flags() if MEGATRON_FLAGS.find(spelling)]


def test_inert_flags_of_a_recipe_are_taken_with_one_warning_each():
    parsed = parse([*SMALL, *shlex.split(RECIPE)])
    assert parsed.problems == ()
    assert len([note for note in parsed.notes if note.startswith("--moe-permute-fusion has no effect: ")]) == 1
    assert not [note for note in parsed.notes if note.startswith(("--context-parallel-size", "--spec"))]


def test_flag_given_twice_warns_once():
    assert len(parse(["--use-mcore-models", "--use-mcore-models"]).notes) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fp16", "given --fp16; needed: a run without it: fp16 is not built; change: --bf16"),
        ("--use-checkpoint-args", "settings come from the command line"),
        ("--load-main-params-from-ckpt", "change: --no-load-optim"),
        ("--non-persistent-save-interval 5", "one node"),
        ("--mtp-detach-heads", "its gradient reaches the trunk"),
        ("--distribute-saved-activations", "not built yet"),
        ("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules moe"),
        ("--fp8-format hybrid", "FP8"),
        ("--context-parallel-size 2", "needed: 1, the only value taken"),
        ("--transformer-impl transformer_engine", "needed: local, the only value taken"),
        ("--attention-backend flash", "needed: auto or local or unfused, the only values taken: "),
        ("--spec my.module my_spec", "hybrid_stack_spec or local"),
        ("--num-layers-per-virtual-pipeline-stage 2", "put | into --hybrid-layer-pattern"),
        ("--pipeline-model-parallel-layout Et|L", "put | into --hybrid-layer-pattern"),
        ("--ddp-average-in-collective", "stated order"),
        ("--tp-comm-overlap", "stated order"),
        ("--use-megatron-fsdp", "change: --use-distributed-optimizer"),
        ("--align-param-gather", "change: --no-align-param-gather and"),
        ("--overlap-param-gather-with-optimizer-step", "change: --overlap-param-gather"),
        ("--batch-size 4", "change: --global-batch-size"),
        ("--otel-exporter a b c", "logs go to files"),
        ("--inprocess-max-iterations 3", "restarts"),
        ("--decrease-batch-size-if-needed", "batch sizes are taken as given"),
        ("--window-size 128,0", "not built yet"),
    ],
)
def test_flag_is_refused_once_with_a_reason(words: str, expected: str):
    (problem,) = refusals(*words.split())
    assert expected in problem


def test_every_refusal_and_every_warning_is_a_sentence_with_a_way_out():
    for spelling in (entry.spelling for entry in MEGATRON_FLAGS.entries if not entry.spelling.endswith("*")):
        flag = MEGATRON_FLAGS.find(spelling)
        assert flag is not None and flag.reason
        problem = flag.problem(spelling, ["nothing-like-this"])
        assert problem is None or (spelling in problem.given and problem.change)
        assert (flag.kind == "ignored") == bool(flag.note(spelling) and "has no effect" in flag.note(spelling))


def test_old_name_of_the_pattern_still_works_and_warns():
    parsed = parse(["--hybrid-override-pattern", "M*"])
    assert parsed.config.model.hybrid_layer_pattern == "M*"
    assert parsed.notes == ("--hybrid-override-pattern is deprecated: use --hybrid-layer-pattern",)


def test_old_and_new_name_of_the_pattern_exclude_each_other():
    (problem,) = refusals("--hybrid-override-pattern", "M*", "--hybrid-layer-pattern", "M*")
    assert "--hybrid-override-pattern and --hybrid-layer-pattern; needed: one of the two" in problem


def test_rotary_switch_is_a_position_type():
    assert parse(["--use-rotary-position-embeddings"]).config.model.position_embedding_type == "rope"
    same = ["--position-embedding-type", "rope", "--use-rotary-position-embeddings"]
    assert not refusals(*same)
    (problem,) = refusals("--position-embedding-type", "none", "--use-rotary-position-embeddings")
    assert "one of the two" in problem


def test_no_position_embedding_needs_another_position_type():
    assert not refusals("--no-position-embedding", "--position-embedding-type", "rope")
    assert not refusals("--no-position-embedding", "--use-rotary-position-embeddings")
    (problem,) = refusals("--no-position-embedding")
    assert "--no-position-embedding with --position-embedding-type learned_absolute" in problem


def test_values_of_a_taken_flag_do_not_spill_over():
    assert refusals("--cp-comm-type", "a2a", "p2p") == []
    assert "no value for --use-mcore-models" in refusals("--use-mcore-models", "yes")[0]
    assert "--timing-log-level without a value" in refusals("--timing-log-level")[0]


def test_flag_listed_twice_is_a_mistake_of_the_table():
    family = FlagFamily(kind="ignored", reason="r", switches="--a --b", values="--a")
    with pytest.raises(ValueError, match="--a"):
        LegacyTable((family,), ())
