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
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.speculation.eagle.model import NARROW_NOISE
from tokenswift.speculation.heads.files import read_heads
from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.eagle import EagleStudent
from tokenswift.train.heads import HeadsStudent
from tokenswift.train.store import HiddenStore, held_out

TEMPERATURE = 0.7
DEPTHS = 3
HELD_OUT = 0.06  # share of the texts that training held out
PROMPT_END = 3  # tokens that end a prompt: where the answer begins


def student_of(llm: LLM, file: str) -> tuple[Student, torch.Tensor]:
    """A file's drafter or conditioned heads, and the tokens that they name."""
    if file.endswith(".heads.safetensors"):
        heads, _, _ = read_heads(file)
        named = (
            torch.arange(llm.target.vocab_size) if heads.frequent is None else heads.frequent.long()
        )
        return HeadsStudent(heads), named
    drafter = load_eagle(file, llm.target.config)
    if drafter.d2t is None:
        sys.exit(f"{file} names all tokens; valid: a drafter by tokenswift train")
    weights = {name: unstored(weight, torch.float32) for name, weight in drafter.tensors.items()}
    return EagleStudent(drafter.config, weights, DEPTHS).eval(), drafter.d2t


def answer_start(tokens: list[int], prompt_end: list[int]) -> int:
    """Where a text's answer begins: behind the first end of a prompt; at its end without one."""
    for place in range(len(tokens)):
        if tokens[place : place + PROMPT_END] == prompt_end:
            return place + PROMPT_END
    return len(tokens)


def question_kinds() -> list[str]:
    """The kinds of questions that self-written text answers, in turns."""
    file = resources.files("tokenswift").joinpath("data/questions.toml")
    return list(tomllib.loads(file.read_text("utf-8")))


@torch.no_grad()
def agreement(llm: LLM, store: HiddenStore, file: str) -> dict[str, list[float]]:
    """Shares by kind, and of all."""
    student, named = student_of(llm, file)
    noise_weight = NARROW_NOISE if isinstance(student, EagleStudent) else 1.0
    base = FrozenBase(llm, named, torch.bfloat16)
    head = unstored(llm.source.weight(HEAD), torch.bfloat16)
    kinds = question_kinds()
    prompt_end = llm.encode([{"role": "user", "content": "?"}])[-PROMPT_END:]
    right = {kind: torch.zeros(DEPTHS + 1) for kind in [*kinds, "all"]}
    generator = torch.Generator().manual_seed(5)
    for number in held_out(store, HELD_OUT)[1]:
        tokens = store.texts[number].long()
        states = store.states(number)
        count = len(tokens) - student.levels
        first = min(count, answer_start(tokens.tolist(), prompt_end))
        noise = -torch.log(-torch.log(torch.rand(len(tokens), len(head), generator=generator)))
        hidden = states[:, -llm.target.hidden_size :]
        logits = (base.normed(hidden) @ head.T).float() / TEMPERATURE
        chosen = (logits + noise).argmax(-1)
        agreed = torch.ones(count, dtype=torch.bool)
        counts = [count - first]
        for depth, drafted in enumerate(student(tokens[None], states[None].float(), base), 1):
            places = torch.arange(count) + depth
            scores = (drafted.bfloat16() @ base.rows[: base.size].T).float() / TEMPERATURE
            scores += noise_weight * noise[places][:, named]
            agreed &= named[scores.argmax(-1)] == chosen[places]
            counts.append(int(agreed[first:].sum()))
        for kind in (kinds[number % len(kinds)], "all"):
            right[kind] += torch.tensor(counts)
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
