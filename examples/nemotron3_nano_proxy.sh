#!/usr/bin/env bash
# The Nano proxy: fourteen layers of Nemotron 3 Nano's widths with 32 experts instead of 128, 3.0 billion parameters.
# Four micro-batches of one sequence of 8,192 tokens per data-parallel rank. One GPU of 80 GB or more is enough.
#
#   bash examples/nemotron3_nano_proxy.sh [FLAGS...]      further flags are added, and win over those here
#
#   GPUS=1         processes on this machine
#   LAUNCHER=...   replaces torchrun, for instance by python under srun
#   DATA, TOKENIZER  prefix of a .bin/.idx pair and the tokenizer.json it was made with; mock data when not given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpus=${GPUS:-1}
read -ra launcher <<<"${LAUNCHER:-torchrun --standalone --nproc-per-node $gpus}"
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

model=(
    --hybrid-layer-pattern 'MEMEM*EMEMEM*E'
    --hidden-size 2688 --seq-length 8192 --max-position-embeddings 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
    --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 32 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --normalization RMSNorm --norm-epsilon 1e-5 --squared-relu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type none
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0173
)
training=(
    --bf16 --use-distributed-optimizer --deterministic-mode
    --micro-batch-size 1 --global-batch-size $((4 * gpus)) --train-iters 100 --log-interval 1 --log-throughput
    --lr 1.6e-3 --min-lr 1.6e-5 --lr-decay-style cosine --lr-warmup-iters 10
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --eval-iters 0
)
if [[ -n ${DATA:-} ]]; then
    data=(--data-path "$DATA" --split '99,1,0' --tokenizer-type HuggingFaceTokenizer)
    data+=(--tokenizer-model "${TOKENIZER:?TOKENIZER: the tokenizer.json that DATA was made with}")
else
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 131072)
fi

exec "${launcher[@]}" pretrain_hybrid.py "${model[@]}" "${training[@]}" "${data[@]}" "$@"
