#!/bin/sh
# Train heads and an EAGLE-3 drafter for the default model from one store of text, and compare them:
#
#   scripts/train_eagle.sh NOVELS HELD_OUT WORK
#
# NOVELS is a folder of the five novels that the shipped heads learnt from (src/tokenswift/data/smollm2-135m.heads.md
# names them and those that were kept out, which HELD_OUT holds). Both trainings see the same positions, 512 a step.
# Run again after an interruption, the command goes on where it was. LIMIT="--tokens 40000 --steps 100" makes it a trial.
set -eu
novels=$1 held_out=$2 work=$3
mkdir -p "$work"
tokenswift train --data "$novels" --continued --tokens 392000 --sequence-length 768 --prompt-lengths 256 --seed 11 \
    --epochs 3 ${LIMIT:-} --out "$work/heads.safetensors" --work "$work/heads"
steps=${LIMIT:+$(echo " $LIMIT" | sed -n 's/.* \(--steps [0-9]*\).*/\1/p')}
tokenswift train --kind eagle --states "$work/heads" --seed 11 --epochs 3 ${steps:-} --out "$work/eagle" --work "$work/eagle.work"
python -m scripts.drafter_rates smollm2-135m "$work/heads.safetensors" "$work/eagle" "$held_out"
