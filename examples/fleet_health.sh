#!/usr/bin/env bash
# A test of machines: trains a little with every step computed twice (--replay-check-interval 1), on every GPU of this
# machine by itself and at the same time, several times over, then on all of them together. Names the machine and the
# device that fail: a step that gives two results, a run that differs from the one before, a device that differs from
# the first one.
#
#   bash examples/fleet_health.sh [FLAGS...]                          this machine
#   srun --ntasks-per-node=1 bash examples/fleet_health.sh            every machine of an allocation
#
#   DEVICES=...      GPUs to test (default: all; without a GPU: 2 processes)
#   STEPS=20         steps of a run
#   REPEATS=2        runs on every device
#   DIR=...          new folder for fingerprints and logs (default: runs/fleet_health); a folder in it per machine
#   REFERENCE=...    fingerprint folder of such a run on a machine that is trusted: every device must equal it
#   PYTHON=python    interpreter
#
# Exit code 0: healthy. 4: something failed; every failure is one line. 2: DIR holds results of this machine already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python} steps=${STEPS:-20} repeats=${REPEATS:-2} host=$(hostname) failed=0
if command -v nvidia-smi >/dev/null; then
    example=nemotron3_nano_proxy.sh devices=${DEVICES:-$(nvidia-smi -L | wc -l)}
else
    example=tiny_cpu.sh devices=${DEVICES:-2}
fi
folder=${DIR:-runs/fleet_health}/$host
if [[ -e $folder ]]; then
    echo "$folder is there already: name another DIR" >&2
    exit 2
fi
mkdir -p "$folder"

# train NAME LAUNCHER DEVICES [FLAGS...]: one run into $folder/NAME.
train() {
    local name=$1 launcher=$2 visible=$3
    shift 3
    LAUNCHER=$launcher CUDA_VISIBLE_DEVICES=$visible bash "examples/$example" --train-iters "$steps" \
        --log-interval "$steps" --replay-check-interval 1 --fingerprint-dir "$folder/$name" "$@" \
        >"$folder/$name.log" 2>&1
}

fail() {
    echo "FAILED $host, $1: $2"
    failed=1
}

# What a run that failed says of itself.
reason() {
    grep -m 1 'silent data corruption' "$folder/$1.log" || tail -n 1 "$folder/$1.log"
}

# same A B NAME: whether two runs have the same fingerprints.
same() {
    local said
    said=$($python -m megatron.determinism compare "$1" "$2") || fail "$3" "unlike $1: $(head -n 1 <<<"$said")"
}

for ((run = 1; run <= repeats; run++)); do
    declare -A running=()
    for ((device = 0; device < devices; device++)); do
        train "device_${device}_run_$run" "$python" "$device" "$@" &
        running[$device]=$!
    done
    for ((device = 0; device < devices; device++)); do
        name=device_${device}_run_$run
        if ! wait "${running[$device]}"; then
            fail "device $device" "$(reason "$name")"
        elif [[ -n ${REFERENCE:-} ]]; then
            same "$REFERENCE" "$folder/$name" "device $device"
        elif [[ $name != device_0_run_1 && -e $folder/device_0_run_1/fingerprint.jsonl ]]; then
            same "$folder/device_0_run_1" "$folder/$name" "device $device"
        fi
    done
done

if ((devices > 1)); then
    all=$(seq -s , 0 $((devices - 1)))
    launcher="$python -m torch.distributed.run --standalone --nproc-per-node $devices"
    GPUS=$devices train together "$launcher" "$all" "$@" || fail "all devices together" "$(reason together)"
fi

if ((failed)); then
    exit 4
fi
echo "healthy: $host, $devices devices, $repeats runs of $steps steps each, every step computed twice"
