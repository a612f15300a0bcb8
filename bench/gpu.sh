#!/usr/bin/env bash
# Everything to do when a CUDA device is at hand: kernels against references, lossless tests, figures.
#   bench/gpu.sh [RESULTS_FOLDER]     (default: bench/results/<device>)
# NOVELS names a folder of long texts for prompts of 2,000 and 8,000 tokens (default: our own, 1,000).
# PYTHON names the interpreter (default: .venv/bin/python, else python3). Nothing is fetched when
# TOKENSWIFT_CACHE holds the default model.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(0).split()[-1].lower())' 2>/dev/null) || {
    echo "error: no CUDA device is available" >&2
    exit 2
}
results=${1:-bench/results/$device}
mkdir -p "$results"

failed=0 # what a card shows first stops nothing that comes after it
"$PYTHON" -m pytest -m gpu -s tests/gpu/test_kernels.py || failed=1 # the check at loading, then kernel by kernel
"$PYTHON" -m pytest -m gpu tests/gpu tests/sampling/test_noise.py --ignore=tests/gpu/test_kernels.py || failed=1
texts=(--prompts shipped --set prefill=900)
[ -z "${NOVELS:-}" ] || texts=(--prompts "$NOVELS")
"$PYTHON" -m tokenswift.cli.main bench run trees acceptance --preset cpu --device cuda --results "$results"
"$PYTHON" -m tokenswift.cli.main bench run table3 --preset cpu --device cuda "${texts[@]}" --set points=400 \
    --results "$results/paper"
exit $failed
