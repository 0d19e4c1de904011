"""Every flag of Megatron's that is no setting here, with its fate."""

from __future__ import annotations

from megatron.training.config.legacy import FlagFamily, LegacyFlag, LegacyTable
from megatron.training.config.legacy_model import DATA, EXPERTS, MODEL, PRECISION
from megatron.training.config.legacy_run import CHECKPOINTS, LOGGING, LOOP, OPTIMIZER, PARALLELISM, RESILIENCE

DEPRECATED = (
    FlagFamily(
        kind="ignored",
        reason="Megatron-LM has retired it, and here there is nothing it could switch",
        switches="--use-mcore-models --use-dist-ckpt --ckpt-fully-parallel-save --is-hybrid-model --use-flash-attn "
        "--enable-experimental",
    ),
    FlagFamily(
        kind="refused", reason="Megatron-LM has renamed it", change="--global-batch-size", values="--batch-size"
    ),
    FlagFamily(kind="refused", reason="Megatron-LM has renamed it", change="--lr-warmup-fraction", values="--warmup"),
    FlagFamily(
        kind="refused",
        reason="Megatron-LM has renamed it",
        change="--tensor-model-parallel-size",
        values="--model-parallel-size",
    ),
)

SINGLE = (
    LegacyFlag(
        spelling="--hybrid-override-pattern",
        arity="1",
        kind="alias",
        reason="use --hybrid-layer-pattern",
        target="--hybrid-layer-pattern",
    ),
    LegacyFlag(
        spelling="--use-rotary-position-embeddings",
        arity="0",
        kind="alias",
        reason="use --position-embedding-type rope",
        target="--position-embedding-type",
        value="rope",
    ),
    LegacyFlag(
        spelling="--recompute-activations",
        arity="0",
        kind="alias",
        reason="use --recompute-granularity selective",
        target="--recompute-granularity",
        value="selective",
    ),
    LegacyFlag(
        spelling="--no-position-embedding",
        arity="0",
        kind="ignored",
        reason="--position-embedding-type says it all",
        unless=("--position-embedding-type", "learned_absolute"),
    ),
)

MEGATRON_FLAGS = LegacyTable(
    (
        *MODEL,
        *EXPERTS,
        *PARALLELISM,
        *PRECISION,
        *OPTIMIZER,
        *LOOP,
        *CHECKPOINTS,
        *DATA,
        *LOGGING,
        *RESILIENCE,
        *DEPRECATED,
    ),
    SINGLE,
)
"""The flags by spelling."""
