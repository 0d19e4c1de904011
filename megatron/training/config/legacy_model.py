"""Megatron's flags about what is computed, from which data and in which number format, that are no settings here."""

from __future__ import annotations

from megatron.training.config.legacy import FlagFamily

_NOT_YET = "not built yet"

MODEL = (
    FlagFamily(
        kind="ignored",
        reason="the routing weight is always applied inside the experts' activation",
        switches="--use-fused-weighted-squared-relu",
    ),
    FlagFamily(
        kind="refused",
        reason="these activations are not built",
        change="--squared-relu, --swiglu, or neither for GELU",
        switches="--quick-geglu --openai-gelu",
    ),
    FlagFamily(
        kind="refused",
        reason=f"scaled or interpolated rotary frequencies are {_NOT_YET}",
        change="leave it out, or set --rotary-base",
        switches="--use-rope-scaling",
        values="--rotary-seq-len-interpolation-factor --rope-scaling-factor",
    ),
    FlagFamily(
        kind="ignored",
        reason="attention scores and their softmax are always computed in fp32",
        switches="--attention-softmax-in-fp32 --no-masked-softmax-fusion",
    ),
    FlagFamily(
        kind="ignored",
        reason="each of these steps is one op with one arithmetic here; there is no second form to switch to",
        switches="--no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --cross-entropy-loss-fusion --disable-mamba-mem-eff-path",
    ),
    FlagFamily(
        kind="only",
        reason="the loss is one op over the cut vocabulary, whose order of additions is fixed",
        accepted=("native",),
        values="--cross-entropy-fusion-impl",
    ),
    FlagFamily(
        kind="refused",
        reason="scores in fp32 need no scaling by layer",
        switches="--apply-query-key-layer-scaling",
    ),
    FlagFamily(
        kind="refused",
        reason="norm weights are stored as they are, not minus one",
        switches="--apply-layernorm-1p",
    ),
    FlagFamily(
        kind="only",
        reason="there is one stack, made of this package's own layers",
        accepted=("megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec", "local"),
        optional_lists="--spec",
    ),
    FlagFamily(
        kind="only",
        reason=f"layers on Transformer Engine are {_NOT_YET}",
        change="--transformer-impl local, or leave it out",
        accepted=("local",),
        values="--transformer-impl",
    ),
    FlagFamily(
        kind="only",
        reason="which attention runs is chosen among the registered variants",
        change="leave it out; --op-variants attention=NAME picks one (megatron-determinism kernels list)",
        accepted=("auto", "local", "unfused"),
        values="--attention-backend",
    ),
    FlagFamily(
        kind="refused",
        reason="logits have the activations' type and the loss is fp32",
        switches="--fp16-lm-cross-entropy",
        values="--output-logit-dtype",
    ),
    FlagFamily(
        kind="refused",
        reason="the pattern says where stages are cut: one | between two segments",
        change="put | into --hybrid-layer-pattern; PP times n segments give n virtual stages per rank",
        switches="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        values="--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
        "--pipeline-model-parallel-layout --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
    ),
    FlagFamily(
        kind="only",
        reason="the states between chunks of the scan are fp32",
        accepted=("fp32",),
        values="--mamba-training-ssm-states-dtype",
    ),
    FlagFamily(
        kind="refused",
        reason=f"attention and convolution that stop at the borders of documents are {_NOT_YET}",
        change="a data set with one document, or the documents of one topic, in --seq-length tokens",
        switches="--reset-attention-mask --reset-position-ids --dataloader-inter-document-masking",
    ),
    FlagFamily(
        kind="refused",
        reason=f"windows and clipped scores are {_NOT_YET}",
        switches="--qk-clip",
        values="--window-size --window-attn-skip-freq --qk-clip-alpha --qk-clip-threshold --flash-attention-version",
    ),
    FlagFamily(kind="only", reason="no other softmax is built", accepted=("vanilla",), values="--softmax-type"),
    FlagFamily(
        kind="refused",
        reason="multi-latent attention is not built",
        change="--group-query-attention --num-query-groups N",
        switches="--multi-latent-attention --cache-mla-latents",
        values="--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mscale "
        "--mscale-all-dim --beta-fast --beta-slow --experimental-attention-variant",
    ),
    FlagFamily(
        kind="refused", reason="documents are trained on, not conversations", switches="--sft", values="--sft-*"
    ),
    FlagFamily(
        kind="refused",
        reason="every depth reads the hidden state of the one before it, and its gradient reaches the trunk",
        switches="--mtp-detach-heads --mtp-hsm",
    ),
)

EXPERTS = (
    FlagFamily(
        kind="only",
        reason="the E of --hybrid-layer-pattern say which layers have experts",
        accepted=("1",),
        values="--moe-layer-freq",
    ),
    FlagFamily(
        kind="ignored",
        reason="routing, permutation and experts are ops of their own in the order the contract states",
        switches="--moe-router-fusion --moe-permute-fusion --moe-shared-expert-overlap "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ),
    FlagFamily(
        kind="ignored",
        reason="it belongs to --moe-token-dispatcher-type flex, which is not built",
        values="--moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-deepep-num-sms "
        "--moe-hybridep-num-sms",
    ),
    FlagFamily(
        kind="refused",
        reason="a buffer of fixed size per rank belongs to --moe-token-dispatcher-type flex, which is not built",
        change="--moe-expert-capacity-factor, which limits each expert",
        values="--moe-expert-rank-capacity-factor",
    ),
    FlagFamily(
        kind="refused",
        reason="biased or recorded routing is not built",
        change="leave it out; --moe-router-force-load-balancing sends tokens to the experts in turn",
        switches="--moe-enable-routing-replay",
        values="--moe-router-force-biased --moe-routing-trace-path",
    ),
    FlagFamily(
        kind="refused",
        reason=f"upcycling and weights on the input are {_NOT_YET}",
        switches="--moe-apply-probs-on-input --moe-use-upcycling",
        values="--moe-upcycling-granularity",
    ),
    FlagFamily(
        kind="refused",
        reason=f"curves per layer are {_NOT_YET}",
        switches="--moe-per-layer-logging",
    ),
)

PRECISION = (
    FlagFamily(kind="refused", reason="fp16 is not built", change="--bf16", switches="--fp16"),
    FlagFamily(
        kind="ignored",
        reason="gradients are always added in fp32",
        switches="--accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation",
    ),
    FlagFamily(kind="refused", reason="bf16 and fp32 need no loss scale", values="--loss-scale"),
    FlagFamily(
        kind="ignored",
        reason="it belongs to fp16, which is not built",
        values="--initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis",
    ),
    FlagFamily(
        kind="refused",
        reason=f"FP8, MXFP8 and FP4 are {_NOT_YET}",
        change="leave out the flags of FP8 and FP4; --bf16",
        switches="--no-fp8-wgrad --fp8-output-proj --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
        "--fp4-param-gather --first-last-layers-bf16 --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8",
        values="--fp8-format --fp8-recipe --fp8-margin --fp8-interval --fp8-amax-history-len "
        "--fp8-amax-compute-algo --fp4-format --fp4-recipe --num-layers-at-start-in-bf16 "
        "--num-layers-at-end-in-bf16 --te-precision-config-file --kitchen-config-file --kitchen-recipe-number",
    ),
)

DATA = (
    FlagFamily(kind="ignored", reason="a tokenizer never runs code of its own", switches="--trust-remote-code"),
    FlagFamily(
        kind="ignored",
        reason="no sample depends on it, and indices are opened in one way",
        switches="--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap",
    ),
    FlagFamily(
        kind="refused",
        reason="data is read from a file system that every rank sees",
        values="--object-storage-cache-path --per-dataset-sequences-path",
    ),
)
