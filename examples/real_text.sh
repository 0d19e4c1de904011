#!/usr/bin/env bash
# 300 steps of a one-million-parameter hybrid model on real text, byte by byte, on two CPU processes (two pipeline
# stages): the run of the README's picture. Five to eight minutes; the run folder gets curves.png.
#
#   bash tools/venv.sh data,observe && . .venv/bin/activate
#   bash examples/real_text.sh [FLAGS...]         further flags are added, and win over those here
#
#   DATA           prefix of a .bin/.idx pair of the byte tokenizer; default: the sources of Python's standard library
#   LAUNCHER=...   replaces torchrun
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra launcher <<<"${LAUNCHER:-torchrun --standalone --nproc-per-node 2}"
folder=runs/real_text

if [[ -z ${DATA:-} ]]; then
    mkdir -p "$folder"
    DATA=$folder/python_text_document
    if [[ ! -f $DATA.idx ]]; then
        python tools/python_text.py "$folder/python.jsonl"
        python tools/preprocess_data.py --input "$folder/python.jsonl" --output-prefix "$folder/python" \
            --tokenizer-type ByteTokenizer --append-eod
    fi
fi

model=(
    --hybrid-layer-pattern 'ME*E|M-ME' --pipeline-model-parallel-size 2
    --hidden-size 128 --ffn-hidden-size 256 --seq-length 256 --max-position-embeddings 256
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 16
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-state-dim 32 --mamba-num-groups 2
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --normalization RMSNorm --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0.0 --hidden-dropout 0.0
)
training=(
    --micro-batch-size 2 --global-batch-size 8 --train-iters 300 --log-interval 10 --eval-interval 50 --eval-iters 4
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --clip-grad 1.0 --adam-beta2 0.95
    --weight-decay 0.1 --use-distributed-optimizer --deterministic-mode
)
data=(--data-path "$DATA" --tokenizer-type ByteTokenizer --split '98,2,0')

exec "${launcher[@]}" pretrain_hybrid.py "${model[@]}" "${training[@]}" "${data[@]}" \
    --run-dir "$folder/run_$(date +%Y%m%d_%H%M%S)" "$@"
