#!/usr/bin/env bash
# The main job on a fresh machine: set up .venv, tokenise real text, train a small hybrid Mamba / attention / MoE model
# on 4 ranks in two layouts, each launched twice and once more interrupted and resumed, and say whether the launches
# agree bit for bit.
#
#   bash examples/quickstart.sh                   text: Python's own sources and documentation
#   bash examples/quickstart.sh --text FILE...    your own text
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$root/tools/venv.sh" data,observe
exec "$root/.venv/bin/python" "$root/examples/quickstart.py" "$@"
