#!/usr/bin/env bash
# Everything to do when a CUDA device is at hand, in order of value: in all within 25 minutes, each part within its
# own limit and with its rows written as it ends.
#   bench/gpu.sh [RESULTS_FOLDER [PART...]]     (default: bench/results/<device>, all parts)
# Parts: kernels, bits, exact, shape, floors, speed, long, memory, paper. They stop nothing that comes after them.
# TOKENSWIFT_CACHE holds the default model, or it is fetched; files there that were cut into NAME.part* are joined.
# NOVELS names a folder of long texts for the parts speed, long and paper (default: our own, of 1,000 tokens).
# PYTHON names the interpreter (default: .venv/bin/python, else python3). DEVICE=cpu and SHAPE="--layers 1 --width 512"
# try the commands themselves on a machine without a card.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEVICE=${DEVICE:-cuda}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" TOKENSWIFT_SHAPES=0 PYTHONUNBUFFERED=1
device=$DEVICE
if [ "$DEVICE" = cuda ]; then
    device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(0).lower())' 2>/dev/null) || {
        echo "error: no CUDA device is available" >&2
        exit 2
    }
    device=$(grep -oE 'h100|h200|a100|l40s|4090' <<<"$device" || echo "${device##* }")
fi
results=${1:-bench/results/$device}
[ $# -eq 0 ] || shift
parts=${*:-kernels bits exact shape floors speed long memory paper}
mkdir -p "$results" build
for first in "${TOKENSWIFT_CACHE:-build}"/*/*.part00; do
    [ -f "$first" ] || continue
    cat "${first%00}"* >"${first%.part00}" && rm "${first%00}"*
done

big=build/shape-q8_0.gguf
on="--device $DEVICE --results $results"
texts=(--prompts shipped --set prefill=900)
[ -z "${NOVELS:-}" ] || texts=(--prompts "$NOVELS")
failed=0
run() { # SECONDS COMMAND...: the command, its lines shown and kept
    local limit=$1
    shift
    echo "+ $*" | tee -a "$results/gpu.log"
    timeout "$limit" "$@" 2>&1 | tee -a "$results/gpu.log" || failed=1
}
ours() { # SECONDS ARGUMENTS...: our own command line
    run "$1" "$PYTHON" -m tokenswift "${@:2}"
}
rows() { # SECONDS ARGUMENTS...: rows of benchmarks
    run "$1" "$PYTHON" -m benchmarks run "${@:2}"
}
big_there() { [ -f $big ] || run 180 "$PYTHON" bench/shape.py $big ${SHAPE:-}; }
big_ours() { ours "$1" "${@:2}" --model $big --heads none; }
big_rows() { rows "$1" "${@:2}" --model $big --heads none; }

kernels() { run 300 "$PYTHON" -m pytest -q -m gpu -s tests/gpu/test_kernels.py; }
bits() { run 240 "$PYTHON" -m pytest -q -m gpu tests/gpu tests/sampling/test_noise.py --ignore=tests/gpu/test_kernels.py; }
exact() { # the default model: the same text from every strategy, with graphs and without, and over weights of all kinds
    rows 200 trees acceptance --preset cpu --dtype bfloat16 $on
    rows 120 speed --preset smoke --dtype bfloat16 --set weights=stored,bfloat16,q8_0,q4_0 $on
    rows 60 speed --preset smoke --dtype bfloat16 --set cuda_graphs=off $on
    rows 60 speed --preset smoke --dtype bfloat16 --set kv_cache_dtype=int8 $on
    rows 60 speed --preset smoke --dtype int8 $on
}
shape() { big_there; }
floors() { # an 8B model's passes beside their floors: one row, and the 16 and 64 rows of a step that checks drafts
    big_there
    for weights in stored bfloat16 q4_0; do
        for rows in 16 64; do
            ours 150 roofline --model $big --device $DEVICE --dtype bfloat16 --weights $weights --rows $rows \
                --length 4096,32768,100000 --measure --json "$results/floors-$weights-$rows.json"
        done
    done
    ours 90 roofline --model $big --device $DEVICE --dtype bfloat16 --rows 16 --length 4096,100000 --measure \
        --cuda-graphs off --json "$results/floors-stored-16-eager.json"
}
speed() { # adaptive drafting over plain decoding, the default model and the 8B shape
    big_there
    rows 240 speed --preset cpu --dtype bfloat16 "${texts[@]}" $on
    for weights in stored bfloat16; do
        big_rows 150 speed --preset cpu --dtype bfloat16 --variant prose --set weights=$weights --set seeds=1 \
            "${texts[@]}" $on
    done
}
long() { # the same far into a text, by prefilled text
    rows 300 speed --preset cpu --dtype bfloat16 --variant prose --set rope_scaling=yarn --set reach=text \
        --set seeds=1 --set points=20000,40000,60000,80000,100000 --prompts "${NOVELS:-joined}" $on
}
memory() {
    big_there
    for weights in stored bfloat16; do
        big_ours 90 plan --device $DEVICE --dtype bfloat16 --weights $weights --prompt-ids 5,6,7 \
            --max-new-tokens 100000 --no-measure --json "$results/memory-$weights.json"
    done
}
paper() { rows 400 table3 --preset cpu "${texts[@]}" --set points=400 --device $DEVICE --results "$results/paper"; }

for part in $parts; do
    echo "== $part" | tee -a "$results/gpu.log"
    $part
done
"$PYTHON" - "$results" <<'END' 2>&1 | tee -a "$results/gpu.log" || failed=1
import sys
from pathlib import Path
from benchmarks.runner import read_rows
rows = [row for row in read_rows(Path(sys.argv[1])) if row.get("lossless")]
wrong = [f"{row['spec']}: {row['config']['variant']}" for row in rows if not row["identical"]]
print(f"{len(rows) - len(wrong)} of {len(rows)} texts are plain decoding's", *wrong, sep="\n")
sys.exit(bool(wrong))
END
exit $failed
