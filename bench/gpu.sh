#!/usr/bin/env bash
# Everything to do when a CUDA device is at hand, in order of value: eight parts of at most ten minutes each, 25
# together. Rows are written as they are measured; what fails or runs out of time says so and stops nothing else.
#   bench/gpu.sh [PART...]      parts that have not ended well yet, or those that are named
#   bench/gpu.sh kit            gather wheels and the default model in build/gpu-kit, to carry them to a machine
# Parts: start, kernels, passes, eager, sweep, bits, small, rest.
# RESULTS names the folder of rows (default: build/gpu): card.jsonl, rows.jsonl, paper/rows.jsonl and gpu.log.
# Nothing is fetched: wheels come from build/gpu-kit/wheels, the default model from build/gpu-kit/piece-0 to piece-4;
# each of them may come with a call of its own, beside the sources below 64 MiB, before the part small (they are kept
# in KEPT, default /tmp/tokenswift-kit).
# NOVELS names a folder of long texts for small and rest (default: our own, of 1,000 tokens).
# PYTHON names the interpreter. REHEARSE=1: no card is here; each part runs up to its first call of one.
# DEVICE=cpu with SHAPE="--layers 1 --width 512 --contexts 64,32" tries the commands themselves.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEVICE=${DEVICE:-cuda} RESULTS=${RESULTS:-build/gpu} KEPT=${KEPT:-/tmp/tokenswift-kit} KIT=build/gpu-kit
MODEL=smollm2-135m GGUF=SmolLM2-135M-Instruct.Q4_1.gguf
# what the card's machine lacks: Python 3.12 with torch 2.11, Triton 3.6 and transformers 5.17 is there
WHEELS=("msgspec>=0.20" gguf beartype "llguidance>=1.9,<2" "shtab>=1.7" "prompt_toolkit>=3.0.40" wcwidth)
ALL="start kernels passes eager sweep bits small rest"
declare -A LIMIT=([start]=150 [kernels]=240 [passes]=270 [eager]=180 [sweep]=150 [bits]=120 [small]=210 [rest]=180)

kit() { # wheels for Python 3.12 on x86-64, and the default model in five pieces of 19 MiB
    rm -rf $KIT && mkdir -p $KIT/wheels
    local platforms=() old
    for old in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${old}_x86_64")
    done
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d $KIT/wheels "${WHEELS[@]}" || return 1
    local from=${TOKENSWIFT_CACHE:-$HOME/.cache/tokenswift}/$MODEL
    [ -f "$from/$GGUF" ] || { echo "error: there is no default model in $from; tokenswift demo makes it" >&2; return 1; }
    local at
    for at in 0 1 2 3 4; do
        mkdir -p $KIT/piece-$at/$MODEL && split -n $((at + 1))/5 "$from/$GGUF" >$KIT/piece-$at/$MODEL/$GGUF.part$at || return 1
    done
    find "$from" -maxdepth 1 -type f ! -name $GGUF -exec cp -p {} $KIT/piece-0/$MODEL/ \;
    du -sm $KIT/*
}
if [ "${1:-}" = kit ]; then kit; exit; fi

mkdir -p "$RESULTS" "$KEPT"
export PYTHONPATH="src:.:$KEPT/site${PYTHONPATH:+:$PYTHONPATH}" TOKENSWIFT_SHAPES=0 PYTHONUNBUFFERED=1
export PIP_NO_INDEX=1 HF_HUB_OFFLINE=1
say() { echo "$*" | tee -a "$RESULTS/gpu.log"; }
row() { # PART CODE SECONDS: how a part ended, with the last line that it said if it failed
    local why=""
    [ "$2" = 0 ] || why=$(tail -n 1 "$RESULTS/gpu.log" | tr -d '\000-\037"\\' | cut -c1-200)
    printf '{"part": "%s", "ended": %d, "seconds": %d, "why": "%s"}\n' "$1" "$2" "$3" "$why" >>"$RESULTS/card.jsonl"
}
run() { # SECONDS COMMAND...: a command, for so long or as long as its part still has; its lines are shown and kept
    local limit=$1 left=$((deadline - SECONDS)) code
    shift
    [ "$limit" -lt "$left" ] || limit=$left
    say "+ $*"
    if [ "$limit" -lt 1 ]; then say "no time left"; failed=1; return; fi
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$RESULTS/gpu.log"
    code=${PIPESTATUS[0]}
    [ "$code" != 124 ] || say "ran longer than $limit seconds"
    if [ -n "${REHEARSE:-}" ] && { [ "$code" = 3 ] ||
        { [ "$code" = 2 ] && tail -n 3 "$RESULTS/gpu.log" | grep -q "no CUDA device"; }; }; then
        code=0 # it came to a card
    fi
    [ "$code" = 0 ] || failed=1
}
card() { run 600 "$PYTHON" bench/card.py "$1" --results "$RESULTS" --device $DEVICE ${SHAPE:-} --seconds $((deadline - SECONDS - 10)); }
rows() { run "$1" "$PYTHON" -m benchmarks run "${@:2}" --device $DEVICE; }
tests() { run 600 "$PYTHON" -m pytest -q -m gpu -n ${PROCESSES:-8} --dist load -p no:cacheprovider "$@"; }

start() {
    if ls $KIT/wheels/*.whl >/dev/null 2>&1 && [ ! -d "$KEPT/site" ]; then
        run 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$KEPT/site" $KIT/wheels/*.whl
    fi
    card start
}
kernels() { tests tests/gpu/test_kernels.py; }
passes() { card passes; }
eager() { card eager; }
sweep() { card sweep; }
bits() { tests tests/gpu/test_cuda.py tests/sampling/test_noise.py; }
joined() { # the default model, as soon as all of its pieces have come
    local at=$KEPT/$MODEL/$GGUF piece
    if [ ! -f "$at" ]; then
        for piece in $KIT/piece-?; do [ ! -d "$piece" ] || cp -rp "$piece/." "$KEPT/"; done
        if [ "$(ls "$at".part? 2>/dev/null | wc -l)" = 5 ]; then cat "$at".part? >"$at" && rm "$at".part?; fi
    fi
    export TOKENSWIFT_CACHE=$KEPT
}
texts() { # our own of 1,000 tokens, or novels
    TEXTS=(--prompts shipped --set prefill=900)
    [ -z "${NOVELS:-}" ] || TEXTS=(--prompts "$NOVELS")
}
small() { # the default model: the same text from every strategy, with graphs and without; weights of all kinds; speed
    local on="--results $RESULTS --dtype bfloat16"
    texts
    rows 60 speed --preset smoke $on
    rows 90 speed --preset cpu "${TEXTS[@]}" $on
    rows 60 trees acceptance --preset smoke $on
    rows 60 speed --preset smoke --set weights=stored,bfloat16,q8_0,q4_0 $on
    rows 30 speed --preset smoke --set cuda_graphs=off $on
    rows 30 speed --preset smoke --set kv_cache_dtype=int8 $on
    rows 30 speed --preset smoke --dtype int8 --results "$RESULTS"
}
rest() { # far into a text, memory, the paper's tables
    texts
    rows 90 speed --preset cpu --dtype bfloat16 --variant prose --set rope_scaling=yarn --set reach=text \
        --set seeds=1 --set points=20000,60000,100000 --prompts "${NOVELS:-joined}" --results "$RESULTS"
    run 40 "$PYTHON" -m tokenswift plan --device $DEVICE --dtype bfloat16 --prompt-ids 5,6,7 \
        --max-new-tokens 8000 --no-measure --json "$RESULTS/memory.json"
    rows 120 table3 --preset cpu "${TEXTS[@]}" --set points=400 --results "$RESULTS/paper"
}

ended() { grep -q "\"part\": \"$1\", \"ended\": 0" "$RESULTS/card.jsonl" 2>/dev/null; }
wrong=0
for part in ${*:-$ALL}; do
    [ -n "${LIMIT[$part]:-}" ] || { echo "error: part is '$part'; valid: kit, ${ALL// /, }" >&2; exit 2; }
    if [ $# -eq 0 ] && ended "$part"; then say "== $part: it is done"; continue; fi
    begun=$SECONDS deadline=$((SECONDS + LIMIT[$part])) failed=0
    say "== $part, up to ${LIMIT[$part]} seconds"
    joined
    "$part"
    row "$part" $failed $((SECONDS - begun))
    [ $failed = 0 ] || wrong=1
done
exit $wrong
