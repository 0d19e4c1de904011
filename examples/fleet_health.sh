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
# Every run that begins is a line on stderr, every failure one on stdout. Exit code 0: healthy. 4: a device failed. 2:
# nothing is said of the machine: the command could not start and why (a flag, a file, a package), or DIR holds results of
# this machine already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "fleet_health: $1" >&2
    exit 2
}

begins() {
    echo "fleet_health: after $SECONDS s: $1" >&2
}

python=${PYTHON:-python} steps=${STEPS:-20} repeats=${REPEATS:-2} host=$(hostname) failed=0 unready="" extra=()
if command -v nvidia-smi >/dev/null; then
    example=nemotron3_nano_proxy.sh devices=${DEVICES:-$(nvidia-smi -L | wc -l)}
    extra=(--distributed-backend nccl) # refused where the package torch cannot use the GPUs
else
    example=tiny_cpu.sh devices=${DEVICES:-2}
fi
[[ $devices =~ ^[1-9][0-9]*$ ]] || refuse "$devices devices to test: DEVICES is a number from 1 on"
[[ $repeats =~ ^[1-9][0-9]*$ ]] || refuse "REPEATS=$repeats: a number from 1 on"
command -v "${python%% *}" >/dev/null || refuse "PYTHON=$python: no such program"
[[ $($python -m megatron.determinism.leg_log /dev/null 7 2>/dev/null </dev/null) == 7 ]] ||
    refuse "PYTHON=$python: not Python 3.11 or later"
folder=${DIR:-runs/fleet_health}/$host
another="name another folder: DIR=runs/another bash examples/fleet_health.sh"
[[ ! -e $folder ]] || refuse "$folder is there already: remove it, or $another"
mkdir -p "$folder" || refuse "$folder cannot be made: $another"

# train NAME LAUNCHER DEVICES [FLAGS...]: one run into $folder/NAME.
train() {
    local name=$1 launcher=$2 visible=$3
    shift 3
    LAUNCHER=$launcher CUDA_VISIBLE_DEVICES=$visible bash "examples/$example" --train-iters "$steps" \
        --log-interval "$steps" --replay-check-interval 1 --fingerprint-dir "$folder/$name" "${extra[@]}" \
        "$@" >"$folder/$name.log" 2>&1
}

fail() {
    echo "FAILED $host, $1: $2"
    failed=1
}

# judge WHO NAME CODE: what a run that ended with CODE says of the machine. Refused settings, missing or damaged files,
# missing programs and packages say nothing.
judge() {
    local said code words
    said=$($python -m megatron.determinism.leg_log "$folder/$2.log" "$3")
    code=$(head -n 1 <<<"$said") words=$(tail -n +2 <<<"$said")
    if [[ $code =~ ^(2|3|126|127)$ ]] || grep -qE '^(ModuleNotFound|Import|Syntax)Error' <<<"$words"; then
        unready=${unready:-"the command could not start (exit code $code):"$'\n'"$words"}
    else
        fail "$1" "$(grep -m 1 'silent data corruption' <<<"$words" || tail -n 1 <<<"$words") (exit code $code)"
    fi
}

# same A B WHO: whether two runs have the same fingerprints.
same() {
    local said code=0
    said=$($python -m megatron.determinism compare "$1" "$2") || code=$?
    if ((code == 1)); then
        fail "$3" "unlike $1: $(head -n 1 <<<"$said")"
    elif ((code)); then
        unready=${unready:-"$2 cannot be compared with $1:"$'\n'"$said"}
    fi
}

# Where a run could not start, nothing is kept, so that the same DIR can be used again.
require_started() {
    if [[ -n $unready ]] && ! ((failed)); then
        rm -r -- "$folder"
        refuse "$unready"
    fi
}

for ((run = 1; run <= repeats; run++)); do
    begins "run $run of $repeats, $steps steps on every device by itself ($devices in all); logs in $folder"
    declare -A running=()
    for ((device = 0; device < devices; device++)); do
        train "device_${device}_run_$run" "$python" "$device" "$@" &
        running[$device]=$!
    done
    for ((device = 0; device < devices; device++)); do
        name=device_${device}_run_$run code=0
        wait "${running[$device]}" || code=$?
        if ((code)); then
            judge "device $device" "$name" "$code"
        elif [[ ! -s $folder/$name/fingerprint.jsonl ]]; then
            unready=${unready:-"the command ended well and trained nothing (leave --dry-run and --help out)"}
        elif [[ -n ${REFERENCE:-} ]]; then
            same "$REFERENCE" "$folder/$name" "device $device"
        elif [[ $name != device_0_run_1 && -e $folder/device_0_run_1/fingerprint.jsonl ]]; then
            same "$folder/device_0_run_1" "$folder/$name" "device $device"
        fi
    done
    require_started
done

if ((devices > 1)); then
    all=$(seq -s , 0 $((devices - 1)))
    launcher="$python -m torch.distributed.run --standalone --nproc-per-node $devices" code=0
    begins "one run on all of them together"
    GPUS=$devices train together "$launcher" "$all" "$@" || code=$?
    ((code == 0)) || judge "all devices together" together "$code"
    require_started
fi

if ((failed)); then
    exit 4
fi
echo "healthy: $host, $devices devices, $repeats runs of $steps steps each, every step computed twice"
