#!/usr/bin/env bash
# A tiny hybrid model on two CPU processes: every kind of layer, half a minute, no data files.
#
#   bash examples/tiny_cpu.sh [FLAGS...]          further flags are added, and win over those here
#
# LAUNCHER replaces torchrun: LAUNCHER=python bash examples/tiny_cpu.sh --dry-run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra launcher <<<"${LAUNCHER:-torchrun --standalone --nproc-per-node 2}"

model=(
    --hybrid-layer-pattern 'ME*EM-'
    --hidden-size 64 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16
    --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 128
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --normalization RMSNorm --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0.0 --hidden-dropout 0.0
)
training=(
    --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --log-interval 1
    --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --adam-beta2 0.95
    --weight-decay 0.1 --use-distributed-optimizer --deterministic-mode
)
data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 512)

exec "${launcher[@]}" pretrain_hybrid.py "${model[@]}" "${training[@]}" "${data[@]}" "$@"
