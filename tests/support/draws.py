"""Random recipes, each on several random layouts that have one logical layout; what cannot be run is drawn again."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from megatron.training.cli.parser import parse_run_config
from megatron.training.config.validate import config_problems
from tests.support.legs import leg_flags

MOST_RANKS, STEPS = 4, 3


class Draw(random.Random):
    """Flags by chance."""

    def maybe(self, chance: float, words: str) -> str:
        """The words, or none."""
        return words if self.random() < chance else ""

    def flag(self, name: str, *values: object) -> str:
        """The flag with one of the values."""
        return f"--{name} {self.choice(values)}"


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and the flags of a leg of ``STEPS`` steps on them, see ``leg_flags``."""

    world: int
    words: str


def _shape(draw: Draw) -> str:
    length = draw.choice((16, 17, 33, 40))
    return " ".join(
        (
            f"--seq-length {length} --max-position-embeddings {length}",
            draw.flag("hidden-size", 24, 32, 40, 60),
            draw.flag("ffn-hidden-size", 36, 64, 74),
            draw.flag("num-attention-heads", 2, 4),
            draw.flag("num-query-groups", 1, 2, 4),
            draw.flag("kv-channels", 6, 8, 10),
            draw.flag("mamba-num-heads", 4, 6, 8),
            draw.flag("mamba-head-dim", 3, 5, 8),
            draw.flag("mamba-state-dim", 3, 7, 16),
            draw.flag("mamba-num-groups", 1, 2, 4),
            draw.flag("vocab-size", 100, 257, 509),
            draw.flag("normalization", "RMSNorm", "LayerNorm"),
            draw.flag("position-embedding-type", "rope", "none", "learned_absolute"),
            draw.flag("attention-dropout", 0, 0.1),
            draw.flag("hidden-dropout", 0, 0.1),
            draw.choice(("", "!--squared-relu", "!--squared-relu --swiglu")),
            draw.choice(("", "--bf16", "--bf16 --fp32-residual-connection")),
            draw.maybe(0.5, "!--untie-embeddings-and-output-weights"),
            draw.maybe(0.3, "!--disable-bias-linear"),
            draw.maybe(0.3, "--qk-layernorm"),
        )
    )


def _routing(draw: Draw) -> str:
    losses = draw.sample(("aux_loss", "seq_aux_loss", "global_aux_loss"), draw.randint(1, 3))
    scores = draw.choice(("sigmoid", "sqrtsoftplus", "softmax --moe-router-pre-softmax", "softmax"))
    capacity = (
        f"{draw.flag('moe-expert-capacity-factor', 0.5, 1.3)} {draw.flag('moe-token-drop-policy', 'probs', 'position')}"
    )
    return " ".join(
        (
            draw.flag("num-experts", 4, 8),
            draw.flag("moe-router-topk", 1, 2, 3),
            draw.flag("moe-ffn-hidden-size", 10, 32),
            f"--moe-router-score-function {scores}",
            draw.maybe(1.0 if "softmax" in scores else 0.4, "!--moe-router-enable-expert-bias"),
            f"--moe-router-load-balancing-type {' '.join(losses)} --moe-aux-loss-coeff {'1e-2 ' * len(losses)}",
            draw.maybe(0.3, "--moe-z-loss-coeff 1e-3"),
            draw.maybe(0.3, "--moe-router-topk-scaling-factor 2.5"),
            draw.maybe(0.3, "--moe-router-dtype fp64"),
            draw.maybe(0.3, "--moe-input-jitter-eps 0.1"),
            draw.maybe(0.2, "--moe-router-num-groups 2 --moe-router-group-topk 1"),
            draw.maybe(0.2, "--moe-router-force-load-balancing"),
            draw.maybe(0.3, capacity + draw.maybe(0.5, " --moe-pad-expert-input-to-capacity")),
            draw.maybe(0.3, "--moe-shared-expert-intermediate-size 32" + draw.maybe(0.5, " --moe-shared-expert-gate")),
            draw.maybe(0.2, "--moe-latent-size 16"),
        )
    )


def _training(draw: Draw) -> str:
    return " ".join(
        (
            f"--mock-data --train-iters {STEPS} --lr 1e-3 --lr-warmup-iters 1",
            draw.maybe(0.3, "--calculate-per-token-loss"),
            draw.maybe(0.3, "--eod-mask-loss"),
            draw.maybe(0.3, "--grad-reduce-in-bf16"),
            draw.maybe(0.3, "--optimizer sgd"),
            draw.maybe(0.3, "--dataloader-type cyclic"),
            draw.maybe(0.2, "--clip-grad 0"),
        )
    )


def _physical(draw: Draw) -> str:
    distributed, overlap = draw.maybe(0.6, "--use-distributed-optimizer"), draw.maybe(0.5, "--overlap-grad-reduce")
    modules = draw.sample(("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"), draw.randint(1, 4))
    full = f"--recompute-granularity full {draw.flag('recompute-method', 'uniform', 'block')} --recompute-num-layers 1"
    return " ".join(
        (
            distributed,
            overlap,
            draw.maybe(0.6, "--overlap-param-gather") if distributed and overlap else "",
            draw.choice(("", "--ddp-bucket-size 5000", "--ddp-num-buckets 4", "--ddp-bucket-size 1")),
            draw.choice(("", full, f"--recompute-granularity selective --recompute-modules {' '.join(modules)}")),
            draw.flag("moe-token-dispatcher-type", "alltoall", "allgather"),
            draw.maybe(0.3, "--no-overlap-p2p-communication"),
            draw.maybe(0.3, "--check-weight-hash-across-dp-replicas-interval 1"),
            draw.maybe(0.4, "--replay-check-interval 1"),
        )
    )


def _cut(draw: Draw, layers: str, segments: int) -> str:
    edges = [0, *sorted(draw.randint(0, len(layers)) for _ in range(segments - 1)), len(layers)]
    return "|".join(layers[start:stop] for start, stop in itertools.pairwise(edges))


def _layouts(draw: Draw) -> list[Layout]:
    """One recipe on the layouts of some tries that can be run; none where it cannot be run at all."""
    tp, ldp, micro = draw.choice((1, 1, 2)), draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 2, 3))
    layers = draw.choice("ME*") + "".join(draw.choices("MME*-E", k=draw.randint(1, 4)))
    depths = draw.choice((0, 0, 1, 2)) * ("/" + "".join(draw.choices("ME*-", k=draw.randint(1, 2))))
    logical = (
        f"--tensor-model-parallel-size {tp} {'--sequence-parallel' if tp > 1 else ''} "
        f"{draw.flag('expert-model-parallel-size', 1, 1, 2, 3, 4)} {draw.flag('expert-tensor-parallel-size', 1, tp)} "
        f"--logical-data-parallel-size {ldp} --logical-reduce-block-size {draw.randint(1, ldp)} "
        f"--micro-batch-size {micro} --global-batch-size {micro * ldp * draw.randint(1, 3)}"
    )
    recipe, found = " ".join((_shape(draw), _routing(draw), _training(draw), logical)), []
    for _ in range(8):
        dp, pp, chunks = draw.randint(1, ldp), draw.choice((1, 1, 2, 2, 3, 4)), draw.randint(1, 3)
        pattern = (
            f"--hybrid-layer-pattern {_cut(draw, layers, pp * chunks)}{depths} --pipeline-model-parallel-size {pp}"
        )
        layout = Layout(tp * dp * pp, f"{recipe} {pattern} {_physical(draw)}")
        if layout.world <= MOST_RANKS and not config_problems(parse_run_config(leg_flags(layout.words)), layout.world):
            found.append(layout)
    return found


def drawn_layouts(draw: Draw) -> list[Layout]:
    """The first three layouts of the first recipe that has so many."""
    tries = (_layouts(draw) for _ in itertools.count())
    return next(layouts for layouts in tries if len(layouts) > 2)[:3]
