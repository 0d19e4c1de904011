#!/usr/bin/env bash
# Lint, gates and tests, by one name for developers and CI.
#
#   bash tests/run.sh                     everything a machine without a GPU can run, in one process for each core
#   bash tests/run.sh tests/unit -k norm  further arguments go to pytest, which is then one process
#   bash tests/run.sh -m gpu              the GPU tests, with the python3 that holds a CUDA torch; no .venv, no lint
#
# Lint, types, import layers and the other gates are tests in tests/architecture and come first. Side by side run whole
# files, in the order of their names: tests of a file share what its first one made, and the long files come early.
# Four processes at most, because each starts up to eight ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1
# Tests start Python a hundred times; each would compile our sources again.
unset PYTHONDONTWRITEBYTECODE

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
if (($# == 0)); then
    set -- -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
fi
if [[ -z $marker ]]; then
    exec .venv/bin/python -m pytest -m "not gpu and not slow" "$@"
fi
exec .venv/bin/python -m pytest "$@"
