#!/usr/bin/env bash
# Nemotron 3 Nano, 31.6 billion parameters of which 3.6 are active, pre-training at 8,192 tokens. Eight GPUs of 141 GB
# are enough for EP 8; more GPUs add data parallelism.
#
#   DATA=corpus_text_document TOKENIZER=tokenizer.json bash examples/nemotron3_nano.sh [FLAGS...]
#
# Further flags are added, and win over those here; --dry-run says what a rank needs before a GPU is touched:
#
#   LAUNCHER=python bash examples/nemotron3_nano.sh --dry-run --dry-run-world-size 64
#
#   GPUS=8         processes on this machine
#   LAUNCHER=...   replaces torchrun, for instance by python under srun (examples/slurm/train.sbatch)
#   DATA, TOKENIZER  prefix of a .bin/.idx pair and the tokenizer.json it was made with; mock data when not given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

read -ra launcher <<<"${LAUNCHER:-torchrun --standalone --nproc-per-node ${GPUS:-8}}"
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

model=(
    --hybrid-layer-pattern 'MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME'
    --hidden-size 2688 --seq-length 8192 --max-position-embeddings 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
    --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --normalization RMSNorm --norm-epsilon 1e-5 --squared-relu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type none
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0173
)
layout=(--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-distributed-optimizer)
training=(
    --bf16 --deterministic-mode
    --micro-batch-size 1 --global-batch-size 512 --train-iters 39735 --log-interval 10 --log-throughput
    --lr 1.6e-3 --min-lr 1.6e-5 --lr-decay-style cosine --lr-warmup-iters 333
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --eval-interval 1000 --eval-iters 14
)
if [[ -n ${DATA:-} ]]; then
    data=(--data-path "$DATA" --split '99,1,0' --tokenizer-type HuggingFaceTokenizer)
    data+=(--tokenizer-model "${TOKENIZER:?TOKENIZER: the tokenizer.json that DATA was made with}")
else
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 131072)
fi

exec "${launcher[@]}" pretrain_hybrid.py "${model[@]}" "${layout[@]}" "${training[@]}" "${data[@]}" "$@"
