"""How often a trained drafter's choice is its model's own, by depth and by kind of question.

    python tools/agreement.py MODEL WORK DRAFTER [DRAFTER ...]

DRAFTER is a file of kind eagle or conditioned, trained with --held-out 0.06. WORK is the work
folder of `tokenswift train --model MODEL --data self`, whose held-out answers are looked at,
without their prompts. Both sides choose at temperature 0.7 with the same noise, weighed as in
drafting, the model from its whole vocabulary. One line of JSON for each drafter: by kind, the share
of places where one drafted token, two and three in a row are the model's.
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import resources
from pathlib import Path

import torch

from tokenswift import LLM
from tokenswift.loader.layout import HEAD
from tokenswift.loader.weights import unstored
from tokenswift.speculation.drafters.eagle import NARROW_NOISE
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.speculation.heads.files import read_heads
from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.eagle import EagleStudent
from tokenswift.train.heads import HeadsStudent
from tokenswift.train.store import HiddenStore, held_out

WARMTH, DEPTHS, SHARE = 0.7, 3, 0.06  # SHARE: what training held out
MARK = 3  # tokens that end a prompt: where the answer begins


def student_of(llm: LLM, file: str) -> tuple[Student, torch.Tensor]:
    """A file's drafter or conditioned heads, and the tokens that they name."""
    if file.endswith(".heads.safetensors"):
        heads, _, _ = read_heads(file)
        named = (
            torch.arange(llm.target.vocab_size) if heads.frequent is None else heads.frequent.long()
        )
        return HeadsStudent(heads), named
    found = load_eagle(file, llm.target.config)
    if found.d2t is None:
        sys.exit(f"{file} names all tokens; valid: a drafter by tokenswift train")
    weights = {name: unstored(weight, torch.float32) for name, weight in found.tensors.items()}
    return EagleStudent(found.config, weights, DEPTHS).eval(), found.d2t


@torch.no_grad()
def agreement(llm: LLM, store: HiddenStore, file: str) -> dict[str, list[float]]:
    """Shares by kind, and of all."""
    student, named = student_of(llm, file)
    weight = NARROW_NOISE if isinstance(student, EagleStudent) else 1.0
    base = FrozenBase(llm, named, torch.bfloat16)
    head = unstored(llm.source.weight(HEAD), torch.bfloat16)
    kinds = list(
        tomllib.loads(
            resources.files("tokenswift").joinpath("data/questions.toml").read_text("utf-8")
        )
    )
    mark = llm.encode([{"role": "user", "content": "?"}])[-MARK:]
    right = {kind: torch.zeros(DEPTHS + 1) for kind in [*kinds, "all"]}
    drawn = torch.Generator().manual_seed(5)
    for number in held_out(store, SHARE)[1]:
        tokens, states = store.texts[number].long(), store.states(number)
        count = len(tokens) - student.levels
        text = tokens.tolist()
        first = next((at + MARK for at in range(count) if text[at : at + MARK] == mark), count)
        noise = -torch.log(-torch.log(torch.rand(len(tokens), len(head), generator=drawn)))
        hidden = states[:, -llm.target.hidden_size :]
        wanted = ((base.normed(hidden) @ head.T).float() / WARMTH + noise).argmax(-1)
        same, came = torch.ones(count, dtype=torch.bool), [count - first]
        for depth, made in enumerate(student(tokens[None], states[None].float(), base), 1):
            at = torch.arange(count) + depth
            scores = (made.bfloat16() @ base.rows[: base.size].T).float() / WARMTH
            scores += weight * noise[at][:, named]
            same &= named[scores.argmax(-1)] == wanted[at]
            came.append(int(same[first:].sum()))
        for kind in (kinds[number % len(kinds)], "all"):  # questions come of each kind in turns
            right[kind] += torch.tensor(came)
    return {
        kind: [round(float(n / total[0]), 3) for n in total[1:]]
        for kind, total in right.items()
        if total[0]
    }


def main() -> None:
    """Print the lines."""
    model, work, *files = sys.argv[1:]
    llm = LLM(model, eagle=None, heads=None)
    folder = Path(work) / "states"
    store = HiddenStore(folder, (folder / "made_from").read_text(encoding="utf-8"))
    for file in files:
        print(json.dumps({"drafter": Path(file).name, **agreement(llm, store, file)}), flush=True)


if __name__ == "__main__":
    main()
