"""Megatron's flags about how a run is spread, trained, saved and watched, that are no settings here."""

from __future__ import annotations

from megatron.training.config.legacy import FlagFamily

_NOT_YET = "not built yet"

PARALLELISM = (
    FlagFamily(
        kind="only",
        reason=f"context parallelism is {_NOT_YET}",
        change="--context-parallel-size 1",
        accepted=("1",),
        values="--context-parallel-size",
    ),
    FlagFamily(
        kind="refused",
        reason=f"context parallelism is {_NOT_YET}",
        lists="--hierarchical-context-parallel-sizes",
    ),
    FlagFamily(kind="ignored", reason="it belongs to context parallelism, which is not built", lists="--cp-comm-type"),
    FlagFamily(
        kind="only",
        reason="one copy of the optimizer state is cut over all data-parallel ranks",
        accepted=("1",),
        values="--num-distributed-optimizer-instances",
    ),
    FlagFamily(
        kind="ignored",
        reason="the pipeline's transfers follow a plan that is fixed before the run",
        switches="--overlap-p2p-communication-warmup-flush",
        values="--microbatch-group-size-per-vp-stage",
    ),
    FlagFamily(
        kind="refused",
        reason="ranks are laid out tensor-parallel fastest, then data-parallel, then pipeline",
        switches="--use-tp-pp-dp-mapping",
    ),
    FlagFamily(
        kind="refused",
        reason="no further axis gathers weights",
        values="--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards",
    ),
    FlagFamily(
        kind="ignored",
        reason="no number depends on it, and groups are made with the backend's own settings",
        switches="--disable-gloo-process-groups --enable-gloo-process-groups",
        values="--distributed-timeout-seconds-after-init --nccl-communicator-config-path",
        lists="--high-priority-stream-groups",
    ),
    FlagFamily(
        kind="refused",
        reason="sums across ranks are made in a stated order; a switch or a user buffer that adds on its own has none",
        switches="--use-sharp --tp-comm-overlap --ddp-average-in-collective",
        values="--sharp-enabled-group --tp-comm-overlap-cfg",
    ),
    FlagFamily(
        kind="refused",
        reason="fully sharded parameters are not built",
        change="--use-distributed-optimizer",
        switches="--use-megatron-fsdp --use-torch-fsdp2 --use-custom-fsdp",
    ),
    FlagFamily(
        kind="ignored",
        reason="it belongs to fully sharded parameters, which are not built",
        values="--data-parallel-sharding-strategy --outer-dp-sharding-strategy",
    ),
    FlagFamily(kind="refused", reason="a run needs real processes", switches="--fake-process-group"),
)

OPTIMIZER = (
    FlagFamily(
        kind="refused",
        reason="all parameters have one learning rate",
        values="--decoupled-lr --decoupled-min-lr",
    ),
    FlagFamily(
        kind="ignored",
        reason="buckets travel as soon as their stage has them and end at multiples of 1,024 elements for each rank",
        switches="--no-align-param-gather --no-align-grad-reduce --ddp-pad-buckets-for-high-nccl-busbw",
    ),
    FlagFamily(
        kind="refused",
        reason="pipeline stages do not wait for one another before they gather or reduce",
        change="--no-align-param-gather and --no-align-grad-reduce say what is done",
        switches="--align-param-gather --align-grad-reduce",
    ),
    FlagFamily(
        kind="refused",
        reason="parameters are gathered after the whole step, which a gradient that is not finite may still stop",
        change="--overlap-param-gather",
        switches="--overlap-param-gather-with-optimizer-step",
    ),
    FlagFamily(
        kind="ignored",
        reason="masters, gradients and moments are fp32 in any case",
        switches="--use-precision-aware-optimizer",
    ),
    FlagFamily(
        kind="only",
        reason="masters, gradients and moments are fp32",
        accepted=("fp32",),
        values="--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
    ),
    FlagFamily(
        kind="refused",
        reason="moving optimizer state to the host is not built",
        switches="--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params",
        values="--optimizer-offload-fraction",
    ),
    FlagFamily(
        kind="refused",
        reason="Muon and its relatives are not built",
        switches="--muon-nesterov --muon-use-nesterov --muon-no-split-qkv --muon-use-syrk "
        "--no-use-layer-wise-param-layout",
        values="--muon-momentum --muon-scale-mode --muon-fp32-matmul-prec --muon-coefficient-type "
        "--muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor --muon-scalar-optimizer",
    ),
)

LOOP = (
    FlagFamily(
        kind="refused",
        reason="batch sizes are taken as given or refused",
        change="--global-batch-size, a multiple of --micro-batch-size times the logical data-parallel size",
        switches="--decrease-batch-size-if-needed",
    ),
    FlagFamily(
        kind="refused",
        reason=f"ending between phases is {_NOT_YET}",
        values="--phase-transition-iterations",
    ),
    FlagFamily(
        kind="ignored",
        reason="the threads that read data end with their process",
        switches="--exit-signal-handler-for-dataloader",
    ),
    FlagFamily(
        kind="ignored",
        reason="no number depends on it; torch keeps its own way with memory",
        values="--empty-unused-memory-level --train-sync-interval",
    ),
    FlagFamily(
        kind="refused",
        reason="every data-parallel rank starts from the same weights",
        switches="--data-parallel-random-init",
    ),
    FlagFamily(
        kind="ignored",
        reason="initial weights and noise are drawn by position from the seed, the same on every device and layout",
        switches="--te-rng-tracker --inference-rng-tracker --use-cpu-initialization",
    ),
    FlagFamily(kind="refused", reason="weights are always drawn before training", switches="--no-initialization"),
    FlagFamily(
        kind="refused",
        reason="evaluation uses one validation set",
        change="one --valid-data-path, or a blend",
        switches="--multiple-validation-sets",
        lists="--validation-set-names",
    ),
    FlagFamily(
        kind="refused",
        reason="non-finite values stop the run; other watches and skipped iterations are not built",
        switches="--check-for-spiky-loss --check-for-large-grads",
        values="--gpu-sniff-test-interval",
        lists="--iterations-to-skip",
    ),
)

CHECKPOINTS = (
    FlagFamily(
        kind="ignored",
        reason="every rank writes and reads its own share, every digest is checked, and saves in the background are "
        "threads of the training processes",
        switches="--use-persistent-ckpt-worker --async-ckpt-use-cpu-shm --no-ckpt-fully-parallel-save "
        "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-per-rank-objects --ckpt-assume-constant-structure "
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient --auto-detect-ckpt-format "
        "--verify-integrity --no-save-tokenizer-assets --ckpt-drop-redundant-extra-state",
        values="--async-strategy --async-ckpt-cpu-priority --async-ckpt-io-priority "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group "
        "--ckpt-fully-parallel-load-process-group --dist-ckpt-workers",
    ),
    FlagFamily(
        kind="refused",
        reason="settings come from the command line, and those that must be the checkpoint's are checked against it",
        change="give the settings themselves; a launch that differs is refused with what differs",
        switches="--use-checkpoint-args --use-mp-args-from-checkpoint-args "
        "--no-use-tokenizer-model-from-checkpoint-args",
    ),
    FlagFamily(
        kind="refused",
        reason="the stored weights are the fp32 masters in any case",
        change="--no-load-optim, which keeps them",
        switches="--load-main-params-from-ckpt",
    ),
    FlagFamily(
        kind="refused",
        reason="nothing of a checkpoint may be missing or left over",
        change="leave it out, or --no-load-optim, --no-load-rng or --finetune for what is not there",
        switches="--no-ckpt-load-validate-sharding-integrity",
        values="--dist-ckpt-strictness",
    ),
    FlagFamily(
        kind="refused",
        reason="checkpoints that live on one node, and other formats, are not built",
        change="--save and --save-interval; --async-save makes frequent saves cheap",
        switches="--replication",
        values="--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir "
        "--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication-jump --replication-factor "
        "--ckpt-convert-format --ckpt-convert-save",
    ),
    FlagFamily(kind="refused", reason="progress.txt is not written", switches="--log-progress"),
)

LOGGING = (
    FlagFamily(
        kind="ignored",
        reason="this curve or column is not written; no other output changes",
        switches="--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
        "--log-world-size-to-tensorboard --no-log-loss-scale-to-tensorboard --log-loss-scale-to-tensorboard "
        "--log-device-memory-used --log-energy --log-max-attention-logit --no-barrier-with-level-1-timing",
        values="--log-memory-interval --timing-log-option --tensorboard-queue-size --logging-level",
    ),
    FlagFamily(kind="only", reason="timers are not built", accepted=("0",), values="--timing-log-level"),
    FlagFamily(
        kind="refused",
        reason="logs go to files and TensorBoard",
        change="--run-dir DIR or --tensorboard-dir DIR",
        values="--wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity",
        optional_lists="--otel-*",
    ),
    FlagFamily(
        kind="refused",
        reason="straggler watch, memory history and ranges for outside profilers are not built",
        change="leave it out; --profile --use-pytorch-profiler says where the time of a step goes",
        switches="--record-memory-history --log-straggler --disable-straggler-on-startup --nvtx-ranges",
        values="--memory-snapshot-path --straggler-ctrlr-port --straggler-minmax-count",
    ),
)

RESILIENCE = (
    FlagFamily(
        kind="refused",
        reason="restarts and fault watches inside a run are not built",
        change="leave it out; restart the command",
        switches="--enable-ft-package --calc-ft-timeouts --inprocess-restart --inprocess-empty-cuda-cache",
        values="--ft-num-warmup-iters --result-rejected-tracker-filename --flight-recorder-dump-path "
        "--flight-recorder-trace-buffer-size",
        optional_lists="--inprocess-* --fault-injector-*",
    ),
    FlagFamily(
        kind="only",
        reason="steps are computed twice where --replay-check-interval says so",
        change="leave it out; --replay-check-interval N checks every N-th step before it is taken",
        accepted=("disabled",),
        values="--rerun-mode",
    ),
    FlagFamily(kind="only", reason="faults are not injected", accepted=("0", "0.0"), values="--error-injection-rate"),
    FlagFamily(kind="ignored", reason="faults are not injected", values="--error-injection-type"),
    FlagFamily(
        kind="refused",
        reason=f"moving activations to other ranks or to the host is {_NOT_YET}",
        change="leave it out; --recompute-granularity keeps fewer activations",
        switches="--distribute-saved-activations --fine-grained-activation-offloading",
        values="--cpu-offloading-num-layers",
        lists="--offload-modules",
    ),
    FlagFamily(
        kind="refused",
        reason="Megatron-LM has replaced it",
        change="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or "
        "--recompute-granularity selective --recompute-modules moe",
        switches="--moe-layer-recompute --checkpoint-activations",
    ),
    FlagFamily(
        kind="only",
        reason="CUDA graphs are not built",
        accepted=("none",),
        values="--cuda-graph-impl --inference-cuda-graph-scope",
    ),
    FlagFamily(
        kind="refused",
        reason="CUDA graphs are not built",
        switches="--enable-cuda-graph --external-cuda-graph",
        optional_lists="--cuda-graph-modules --cuda-graph-scope",
    ),
    FlagFamily(
        kind="ignored", reason="it belongs to CUDA graphs, which are not built", values="--cuda-graph-warmup-steps"
    ),
)
