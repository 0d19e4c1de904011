#!/usr/bin/env bash
# Lint, gates and tests, by one name for developers and CI.
#
#   bash tests/run.sh                     everything a machine without a GPU can run
#   bash tests/run.sh tests/unit -k norm  further arguments go to pytest
#   bash tests/run.sh -m gpu              the GPU tests, with the python3 that holds a CUDA torch; no .venv, no lint
#
# Lint, types, import layers and the other gates are tests in tests/architecture and come first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1

marker=""
arguments=("$@")
for i in "${!arguments[@]}"; do
    case ${arguments[i]} in
        -m) marker=${arguments[i + 1]:-} ;;
        -m*) marker=${arguments[i]#-m} ;;
    esac
done

if [[ $marker == gpu ]]; then
    if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        printf 'tests/run.sh -m gpu: needs a python3 whose torch sees a CUDA device; %s has none\n' \
            "$(command -v python3 || printf 'this machine')" >&2
        exit 1
    fi
    exec python3 -m pytest "$@"
fi

bash tools/venv.sh data,observe,oracle,test
if [[ -z $marker ]]; then
    exec .venv/bin/python -m pytest -m "not gpu and not slow" "$@"
fi
exec .venv/bin/python -m pytest "$@"
