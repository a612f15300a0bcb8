#!/bin/sh
# Train what docs/results.md compares:
#
#   tools/train_rivals.sh DATA WORK [MODEL]
#
# Of the default model, without MODEL: DATA is a folder of the five novels to learn from
# (src/tokenswift/data/smollm2-135m.heads.md names them). Each training has the model continue passages of 256 tokens
# by 512, and sees 409,600 of their positions, about twice each. The heads in benchmarks/data learnt from one text that
# two processes wrote (commit a9d395b0).
#
# Of MODEL, a real one such as qwen2.5-coder-0.5b: DATA may be "self", what the model answers to questions. Half as many
# positions, 8,192 tokens in the loss of the paper's heads.
#
# The outcomes are in WORK, where the command goes on after an interruption.
set -eu
data=$1 work=$2 model=${3:-}
mkdir -p "$work"

heads() { # KIND OPTIONS…
    kind=$1
    shift
    tokenswift train --kind "$kind" --data "$data" --sequence-length 768 "$@"
}

# The paper's heads have its loss and optimiser (Table 9); of its sizes the steps and the learning rate stay, and a step
# has 2,048 positions instead of 983,040 (8 windows of 256; the paper: 120 sequences of 8,192). The last are ours on
# the same text: what the kind of heads alone brings.
if [ -z "$model" ]; then
    data_options="--tokens 133120 --write-batch 65"
    heads linear $data_options --batch 2 --window 256 --accumulate 4 --out "$work/paper.heads.safetensors"
    heads medusa $data_options --num-heads 4 --steps 800 --out "$work/medusa.heads.safetensors"
    heads conditioned $data_options --steps 800 --out "$work/conditioned.heads.safetensors"
else
    set -- --model "$model" --tokens 90000
    heads linear "$@" --batch 2 --window 256 --accumulate 2 --loss-vocabulary 8192 \
        --out "$work/$model.linear.heads.safetensors"
    heads medusa "$@" --num-heads 4 --steps 400 --out "$work/$model.medusa.heads.safetensors"
    heads conditioned "$@" --steps 400 --out "$work/$model.conditioned.heads.safetensors"
fi
