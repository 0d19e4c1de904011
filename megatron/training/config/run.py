"""RunConfig: the one frozen tree that holds every setting of a run."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from megatron.core.config.fields import Effect, fields_with_effect
from megatron.core.config.numerics import NumericsConfig
from megatron.core.config.optimizer import DistributedDataParallelConfig, OptimizerConfig, SchedulerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.config.transformer import TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.profile import ProfileConfig
from megatron.training.config.trace import TraceConfig
from megatron.training.config.training import (
    DistributedConfig,
    FingerprintConfig,
    LoggingConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run, grouped by the part that reads it."""

    model: TransformerConfig = TransformerConfig()
    parallel: ModelParallelConfig = ModelParallelConfig()
    numerics: NumericsConfig = NumericsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DistributedDataParallelConfig = DistributedDataParallelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    logging: LoggingConfig = LoggingConfig()
    fingerprint: FingerprintConfig = FingerprintConfig()
    trace: TraceConfig = TraceConfig()
    profile: ProfileConfig = ProfileConfig()

    def with_effect(self, effect: Effect) -> dict[str, dict[str, Any]]:
        """Values of the fields that have the given effect, by group and field name."""
        groups = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: fields_with_effect(group, effect) for name, group in groups.items()}


def config_classes() -> dict[str, type]:
    """The dataclass of each group of ``RunConfig``, by field name, in command line order."""
    hints = typing.get_type_hints(RunConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RunConfig)}
