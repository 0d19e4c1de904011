"""Settings that were given and have no effect, because another one that they belong to was not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields

from megatron.core.config.fields import spelling_of
from megatron.training.config.run import RunConfig
from megatron.training.config.trace import traced_iterations


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Fields of one group that have no effect where ``missing`` holds for the settings in effect; ``needed`` says what
    would give them one, ``instead`` what they do without it. ``*`` at the end of a name stands for any end."""

    needed: str
    missing: Callable[[RunConfig], bool]
    group: str
    names: tuple[str, ...]
    instead: str | None = None


def _lies_beyond(iteration: int, config: RunConfig) -> bool:
    """Whether the run ends before an iteration."""
    return config.training.train_iters is not None and iteration > config.training.train_iters


def _first_beyond(group: str, name: str, instead: str | None = None) -> Idle:
    """The first iteration at which a setting does anything lies beyond the run."""
    return Idle(
        instead=instead,
        needed="iterations that far (--train-iters)",
        missing=lambda config: _lies_beyond(getattr(getattr(config, group), name) or 0, config),
        group=group,
        names=(name,),
    )


def _skipped(group: str, *names: str, instead: str | None = None) -> Idle:
    """Settings of training where there is none."""
    return Idle(
        needed="training (--skip-train leaves it out)",
        missing=lambda config: config.training.skip_train,
        group=group,
        names=names,
        instead=instead,
    )


def _lacks(symbol: str) -> Callable[[RunConfig], bool]:
    return lambda config: symbol not in (config.model.hybrid_layer_pattern or symbol)


IDLE = (
    Idle(
        needed="--save",
        missing=lambda config: config.checkpoint.save is None,
        group="checkpoint",
        names=("save_interval", "save_retain_interval", "save_optim", "save_rng", "async_save"),
    ),
    _skipped("checkpoint", "save", "save_*", "async_save"),
    _skipped("fingerprint", "fingerprint_dir", instead="leaves an empty fingerprint"),
    _skipped("training", "exit_*", "check_weight_hash_across_dp_replicas_interval", "replay_check_interval"),
    _skipped("profile", "profile"),
    _skipped("trace", "trace_dir", instead="leaves a trace of no iteration"),
    Idle(
        needed="--load",
        missing=lambda config: config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None,
        group="checkpoint",
        names=(
            "load_optim",
            "load_rng",
            "override_opt_param_scheduler",
            "use_checkpoint_opt_param_scheduler",
            "new_logical_layout",
        ),
    ),
    Idle(
        needed="--fingerprint-dir",
        missing=lambda config: config.fingerprint.fingerprint_dir is None,
        group="fingerprint",
        names=("fingerprint_interval", "fingerprint_level"),
    ),
    _first_beyond("fingerprint", "fingerprint_interval", "leaves an empty fingerprint"),
    _first_beyond("training", "check_weight_hash_across_dp_replicas_interval"),
    _first_beyond("training", "replay_check_interval"),
    _first_beyond("training", "start_eval_at_iter", "leaves out every evaluation of validation data"),
    Idle(
        instead="leaves a trace of no iteration",
        needed="iterations that far (--train-iters)",
        missing=lambda config: _lies_beyond(traced_iterations(config.trace)[0], config),
        group="trace",
        names=("trace_iterations",),
    ),
    Idle(
        needed="iterations as far as --profile-step-start (--train-iters)",
        missing=lambda config: _lies_beyond(config.profile.profile_step_start, config),
        group="profile",
        names=("profile",),
    ),
    Idle(
        needed="--tensorboard-dir",
        missing=lambda config: config.logging.tensorboard_dir is None,
        group="logging",
        names=("tensorboard_log_interval",),
    ),
    _first_beyond("logging", "tensorboard_log_interval", "leaves TensorBoard without training curves"),
    Idle(
        needed="--manual-gc",
        missing=lambda config: not config.training.manual_gc,
        group="training",
        names=("manual_gc_interval", "manual_gc_eval"),
    ),
    Idle(
        needed="--profile",
        missing=lambda config: not config.profile.profile,
        group="profile",
        names=("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
    ),
    Idle(
        needed="--eval-interval",
        missing=lambda config: config.training.eval_interval is None and config.training.eval_iters > 0,
        group="training",
        names=("eval_iters",),
    ),
    Idle(
        needed="--exit-signal-handler",
        missing=lambda config: not config.training.exit_signal_handler,
        group="training",
        names=("exit_signal",),
    ),
    Idle(
        needed="--eval-interval",
        missing=lambda config: config.training.eval_interval is None,
        group="training",
        names=("eval_global_batch_size", "eval_micro_batch_size"),
    ),
    Idle(
        needed="--eval-interval",
        missing=lambda config: config.training.eval_interval is None,
        group="data",
        names=("valid_data_path", "test_data_path"),
    ),
    Idle(
        needed="data files",
        missing=lambda config: config.data.mock_data,
        group="data",
        names=("split", "data_cache_path"),
    ),
    Idle(
        needed="--optimizer sgd",
        missing=lambda config: config.optimizer.optimizer != "sgd",
        group="optimizer",
        names=("sgd_momentum",),
    ),
    Idle(
        needed="--optimizer adam",
        missing=lambda config: config.optimizer.optimizer != "adam",
        group="optimizer",
        names=("adam_beta1", "adam_beta2", "adam_eps"),
    ),
    Idle(
        needed="--lr-decay-style WSD",
        missing=lambda config: config.scheduler.lr_decay_style != "WSD",
        group="scheduler",
        names=("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ),
    Idle(
        needed="--group-query-attention",
        missing=lambda config: not config.model.group_query_attention,
        group="model",
        names=("num_query_groups",),
    ),
    Idle(
        needed="--position-embedding-type rope",
        missing=lambda config: config.model.position_embedding_type != "rope",
        group="model",
        names=("rotary_base", "rotary_percent"),
    ),
    Idle(
        needed="an attention layer (*) in --hybrid-layer-pattern",
        missing=_lacks("*"),
        group="model",
        names=("qk_layernorm", "group_query_attention", "attention_dropout"),
    ),
    Idle(
        needed="a mixture of experts (E) in --hybrid-layer-pattern",
        missing=_lacks("E"),
        group="model",
        names=("num_moe_experts", "moe_*"),
    ),
    Idle(
        needed="a Mamba layer (M) in --hybrid-layer-pattern",
        missing=_lacks("M"),
        group="model",
        names=("mamba_*",),
    ),
    Idle(
        needed="--moe-router-enable-expert-bias",
        missing=lambda config: not config.model.moe_router_enable_expert_bias,
        group="model",
        names=("moe_router_bias_update_rate",),
    ),
    Idle(
        needed="--moe-expert-capacity-factor",
        missing=lambda config: config.model.moe_expert_capacity_factor is None,
        group="model",
        names=("moe_token_drop_policy",),
    ),
    Idle(
        needed="depths of multi-token prediction (/ in --hybrid-layer-pattern)",
        missing=lambda config: not config.model.prediction_depths,
        group="model",
        names=("mtp_loss_scaling_factor", "mtp_use_repeated_layer"),
    ),
)


def idle_notes(named: Collection[tuple[str, str]], resolved: RunConfig) -> list[str]:
    """One sentence for each thing that is missing, with the flags that were given for nothing. ``named`` has (group,
    field) of everything that was given."""
    notes: list[str] = []
    told: set[str] = set()
    for rule in IDLE:
        if not rule.missing(resolved):
            continue
        group = getattr(resolved, rule.group)
        mine = [f.name for f in fields(group) if (rule.group, f.name) in named and _matches(f.name, rule.names)]
        flags = [flag for name in mine if (flag := spelling_of(type(group), name)) not in told]
        told |= set(flags)
        if flags:
            idle = "have no effect" if len(flags) > 1 else "has no effect"
            notes.append(f"{', '.join(flags)} {rule.instead or idle} without {rule.needed}")
    return notes


def _matches(field: str, names: tuple[str, ...]) -> bool:
    return any(field == name or (name.endswith("*") and field.startswith(name[:-1])) for name in names)
