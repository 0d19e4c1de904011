#!/usr/bin/env bash
# Makes or refreshes the virtual environment .venv in the root of the repository.
#
#   bash tools/venv.sh EXTRAS        for example: bash tools/venv.sh data,observe,test
#
# Needs a Python >= 3.11. Installs this package editable with the named extras; torch 2.13.0 unless a python3 whose
# torch sees a CUDA device is there, which is then used as it is. A second call with the same requirements does
# nothing: .venv/.installed-EXTRAS holds what the last one saw.
set -euo pipefail

readonly TORCH="torch==2.13.0"

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    printf 'no Python >= 3.11 found on PATH; install one and run this again\n' >&2
    return 1
}

has_cuda_torch() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

# What an installation depends on; a clone that was moved has to be installed again, for its paths are absolute.
requirement_set() {
    printf '%s\n' "$TORCH" "$PWD"
    cat pyproject.toml setup.py tools/venv.sh
}

make_venv() {
    local python options=()
    python=$(find_python)
    if has_cuda_torch "$python"; then
        options=(--system-site-packages)
    fi
    printf 'making .venv with %s\n' "$("$python" --version)" >&2
    "$python" -m venv --clear "${options[@]}" .venv
}

main() {
    local extras=${1:?usage: bash tools/venv.sh EXTRAS}
    local stamp=".venv/.installed-$extras" wanted
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    wanted=$(requirement_set | cksum)
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        make_venv
    elif [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    printf 'installing into .venv: %s and this package with the extras %s\n' "$TORCH" "$extras" >&2
    if ! has_cuda_torch .venv/bin/python; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH" >&2
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" >&2
    printf '%s\n' "$wanted" >"$stamp"
}

main "$@"
