"""Greedy answers in int8 beside float32: where they part, and how much that matters.

    python -m benchmarks.answers MODEL [--tokens 200] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`. Twenty fixed questions are answered
greedily in int8, and the same weights read each answer in float32. The first token that float32
would not have chosen is where the two answers part; its margin is how much more likely float32 held
its own token, in nats: a near tie, or another opinion. One line of JSON for each question.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.fetch import model_file, model_name
from benchmarks.json_lines import publish
from benchmarks.row import commit, machine
from tokenswift import LLM, SamplingParams
from tokenswift.audit.logits import IN_FLOATS
from tokenswift.models.decoder import NativeTarget

PALINDROME = (
    "Write a Python function is_palindrome(s) that ignores case and non-letters. Only code."
)
PAGE = (
    "The harbour of the old town was dug by hand in the winter of 1784, when ice kept the fishing "
    "boats ashore and every household sent one pair of arms. It was never deep enough. At low tide "
    "the larger boats lay on their sides in the mud, and the ferry waited outside until the water "
    "came back. In 1902 a company from the city offered to dredge it, on condition that it might "
    "keep the fees for thirty years. The council refused by one vote. Eight years later the "
    "railway reached the next bay, and the ferry moved there. What was left was a small fleet, a "
    "boatyard, and an inn that was famous for its soup."
)
QUESTIONS = (
    PALINDROME,
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Write an SQL query for the three customers with the highest total of orders.",
    "Write a regular expression for dates such as 2026-11-28, and explain it.",
    "Write a JavaScript function that removes duplicates from an array of numbers.",
    "Write a bash command that counts the lines of all .py files below a folder.",
    "What is 17 times 23? Show the steps.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "What is 15 percent of 240, and 240 with 15 percent added?",
    "Solve 3x + 7 = 31 for x.",
    "Give the planets of the solar system as a JSON list of objects with name and order.",
    "Give a JSON object with name, age and city of an invented person. Only JSON.",
    'Turn this into JSON: "apples 3, pears 5, plums 12".',
    "Translate into German: The library is closed on Mondays.",
    "Translate into French: I would like two tickets for tomorrow morning, please.",
    "Translate into Spanish: Where did you leave the keys yesterday?",
    f"Sum up in two sentences:\n\n{PAGE}",
    f"Which three dates or years are in this text, and what happened then?\n\n{PAGE}",
    "Explain to a child why the sky is blue.",
    "Name three advantages of type hints in Python.",
)

#: without penalties, which would move tokens away from the likeliest
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class Parting:
    """An answer in int8, and where float32 would have gone another way.

    Attributes:
        question: as it was asked.
        text: the answer in int8.
        tokens: of the answer.
        place: the first token that float32 would not have chosen; None: it would have chosen all.
        margin: how much more likely float32 held its own token there, in nats.
    """

    question: str
    text: str
    tokens: int
    place: int | None
    margin: float


@torch.inference_mode()
def parting(llm: LLM, question: str, tokens: int) -> Parting:
    """Answer a question in int8, and read the answer in float32."""
    target = llm.target
    if not isinstance(target, NativeTarget):
        sys.exit(f"error: model is {llm.name}; valid: one of the native families")
    prompt = llm.encode([{"role": "user", "content": question}])
    answer = llm.generate(prompt, tokens, sampling=GREEDY)
    written = answer.token_ids
    ids = torch.tensor([*prompt, *written])
    with target.computing(IN_FLOATS):
        cache = target.new_cache(len(ids))
        hidden = target.forward(ids, torch.arange(len(ids)), cache).hidden
        logits = target.logits(hidden[len(prompt) - 1 : -1]).double()
    scores = logits.log_softmax(-1)
    chosen = torch.tensor(written)
    margins = scores.amax(-1) - scores.gather(1, chosen[:, None])[:, 0]
    others = (margins > 0).nonzero()[:, 0].tolist()
    place = others[0] if others else None
    margin = 0.0 if place is None else float(margins[place])
    return Parting(question, answer.text, len(written), place, margin)


def main() -> None:
    """Print a line of JSON for each question."""
    parser = argparse.ArgumentParser(description="Greedy answers in int8 beside float32.")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, at most")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    llm = LLM(str(model_file(options.model)), device="cpu")
    for question in QUESTIONS:
        row = {
            "model": model_name(options.model),
            **asdict(parting(llm, question, options.tokens)),
            "int16_layers": llm.target.wide_layers,
            "commit": commit(),
            "machine": machine(),
        }
        publish(row, options.out)


if __name__ == "__main__":
    main()
