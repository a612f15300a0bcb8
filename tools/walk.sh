#!/bin/sh
# All commands of README and docs from a fresh clone of what is committed here: sh tools/walk.sh [PAGE …]
# The clone is installed with pip into an environment of its own; the model is fetched anew.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet "$here" "$work/clone"
cd "$work/clone"
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint constraints.txt .
TOKENSWIFT_CACHE="$work/cache" "$work/venv/bin/python" tools/walk.py "$@"
