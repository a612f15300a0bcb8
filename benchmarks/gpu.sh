#!/usr/bin/env bash
# The first half hour on a CUDA card: ten minutes of facts, the tests that need a card, the default model's texts and
# speed, the paper's table; and of a real model its speed and where the time of a step goes. Rows are written as they are
# measured; what fails or runs out of time says so and stops nothing else.
#   benchmarks/gpu.sh [PART...]      all parts, or those that are named: facts, tests, small, table, real
#   benchmarks/gpu.sh kit            gather wheels and the default model in build/gpu-kit, for a machine without a network
# RESULTS names the folder of rows (default: build/gpu): card.jsonl, rows.jsonl, paper/rows.jsonl, real.jsonl, steps.jsonl and
# gpu.log.
# The kit is used where it is: wheels from build/gpu-kit/wheels, the default model from build/gpu-kit/cache.
# NOVELS names a folder of long texts for small and table (default: our own, of 1,000 tokens).
# MODEL names the GGUF file of real; without one, real is left out. WORKERS: processes that run tests (default: 8).
# PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
RESULTS=${RESULTS:-build/gpu} KIT=build/gpu-kit
# what a machine with torch, Triton and transformers lacks
WHEELS=("msgspec>=0.20" gguf beartype "llguidance>=1.9,<2" "shtab>=1.7" "prompt_toolkit>=3.0.40" wcwidth)
declare -A LIMIT=([facts]=600 [tests]=600 [small]=300 [table]=300 [real]=200)

if [ "${1:-}" = kit ]; then # for Python 3.12 on x86-64
    mkdir -p $KIT/wheels $KIT/cache
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        -d $KIT/wheels "${WHEELS[@]}" || exit 1
    from=${TOKENSWIFT_CACHE:-$HOME/.cache/tokenswift}/smollm2-135m
    [ -d "$from" ] || { echo "error: there is no default model in $from; tokenswift demo makes it" >&2; exit 1; }
    cp -r "$from" $KIT/cache/ && du -sm $KIT/*
    exit
fi

mkdir -p "$RESULTS"
export PYTHONPATH="src:.:$KIT/site${PYTHONPATH:+:$PYTHONPATH}" TOKENSWIFT_SHAPES=0 PYTHONUNBUFFERED=1
[ ! -d $KIT/cache ] || export TOKENSWIFT_CACHE=$KIT/cache
if ls $KIT/wheels/*.whl >/dev/null 2>&1 && [ ! -d $KIT/site ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target $KIT/site $KIT/wheels/*.whl
fi
say() { echo "$*" | tee -a "$RESULTS/gpu.log"; }
run() { # COMMAND...: for as long as its part still has; its lines are shown and kept
    local left=$((deadline - SECONDS)) code
    say "+ $*"
    if [ $left -lt 1 ]; then say "no time left"; wrong=1; return; fi
    timeout -k 5 $left "$@" 2>&1 | tee -a "$RESULTS/gpu.log"
    code=${PIPESTATUS[0]}
    [ "$code" != 124 ] || say "ran longer than its part may"
    [ "$code" = 0 ] || wrong=1
}
texts() { # our own of 1,000 tokens, or novels
    if [ -z "${NOVELS:-}" ]; then echo "--prompts shipped --set prefill=900"; else echo "--prompts $NOVELS"; fi
}

facts() { run "$PYTHON" -m benchmarks.card --results "$RESULTS" --seconds $((LIMIT[facts] - 10)); }
tests() { run "$PYTHON" -m pytest -q -m gpu -n "${WORKERS:-8}" -p no:cacheprovider -p no:benchmark tests/gpu tests/sampling/test_noise.py; }
small() { # the default model: the same text from every strategy, and its speed
    local on="--results $RESULTS --device cuda --dtype bfloat16"
    run "$PYTHON" -m benchmarks run speed --preset smoke $on
    run "$PYTHON" -m benchmarks run speed --preset cpu $(texts) $on
}
table() { run "$PYTHON" -m benchmarks run table3 --preset cpu $(texts) --set points=400 --results "$RESULTS/paper" --device cuda; }
real() {
    if [ -z "${MODEL:-}" ]; then say "MODEL names no GGUF file"; return; fi
    run "$PYTHON" -m benchmarks.real "$MODEL" --rounds 1 --only novel code "novel, after 3,000 tokens" 16384 --out "$RESULTS/real.jsonl"
    run "$PYTHON" -m benchmarks.step_times "$MODEL" --out "$RESULTS/steps.jsonl"
}

wrong=0
for part in ${*:-facts tests small table real}; do
    [ -n "${LIMIT[$part]:-}" ] || { echo "error: part is '$part'; valid: kit, facts, tests, small, table, real" >&2; exit 2; }
    deadline=$((SECONDS + LIMIT[$part]))
    say "== $part, up to ${LIMIT[$part]} seconds"
    "$part"
done
exit $wrong
