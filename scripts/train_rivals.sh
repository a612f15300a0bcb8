#!/bin/sh
# Train what docs/results.md compares for the default model, all from one store of text:
#
#   scripts/train_rivals.sh NOVELS WORK
#
# NOVELS is a folder of the five novels to learn from (src/tokenswift/data/smollm2-135m.heads.md names them).
# The store: 260 continuations of 512 tokens by the model after passages of 256 tokens, 199,420 tokens, half of
# them by each of two processes. Each training sees 409,600 of its positions, about twice each. The outcomes are
# in WORK; run again after an interruption, the command goes on where it was.
set -eu
novels=$1 work=$2
mkdir -p "$work"

# The store alone, half of it by each of two processes: heads at their start, not trained.
collect() { # SEED
    tokenswift train --kind medusa --epochs 0 --data "$novels" --continued --seed "$1" \
        --tokens 66560 --sequence-length 768 --prompt-length 256 --write-batch 65 \
        --out "$work/untrained-$1.safetensors" --work "$work/store-$1"
}
collect 1 &
second=$!
collect 0
wait $second

heads() { # NAME OPTIONS…
    name=$1
    shift
    tokenswift train --states "$work/store-0" "$work/store-1" --out "$work/$name.heads.safetensors" "$@"
}

# The paper's heads, loss and optimiser (Table 9); of its sizes the steps and the learning rate stay, and a step
# has 2,048 positions instead of 983,040 (8 windows of 256; the paper: 120 sequences of 8,192).
heads paper --kind linear --batch 2 --window 256 --accumulate 4 &
paper=$!
heads medusa --kind medusa --num-heads 4 --steps 800
heads conditioned --kind conditioned --steps 800 # ours on the same store: what the kind of heads alone brings
wait $paper
