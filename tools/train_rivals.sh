#!/bin/sh
# Train what docs/results.md compares for the default model:
#
#   tools/train_rivals.sh NOVELS WORK
#
# NOVELS is a folder of the five novels to learn from (src/tokenswift/data/smollm2-135m.heads.md names them).
# Each training has the model continue 260 passages of 256 tokens by 512, 199,420 tokens, and sees 409,600 of
# their positions, about twice each. The outcomes are in WORK; run again after an interruption, the command goes
# on where it was. The heads in benchmarks/data learnt from one text that two processes wrote (commit a9d395b0).
set -eu
novels=$1 work=$2
mkdir -p "$work"

heads() { # NAME OPTIONS…
    name=$1
    shift
    tokenswift train --data "$novels" --tokens 133120 --sequence-length 768 \
        --write-batch 65 --out "$work/$name.heads.safetensors" "$@"
}

# The paper's heads, loss and optimiser (Table 9); of its sizes the steps and the learning rate stay, and a step
# has 2,048 positions instead of 983,040 (8 windows of 256; the paper: 120 sequences of 8,192).
heads paper --kind linear --batch 2 --window 256 --accumulate 4
heads medusa --kind medusa --num-heads 4 --steps 800
heads conditioned --kind conditioned --steps 800 # ours on the same text: what the kind of heads alone brings
