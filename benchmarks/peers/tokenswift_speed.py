"""This project's speed: run by `benchmarks.lengths` with this interpreter.

    PYTHON tokenswift_speed.py FILE THREADS

Prints its version, then for each line of JSON on its input, {"prompt": tokens, "new_tokens":
number}, the tokens a second of the prompt, and of plain decoding and adaptive drafting behind it:
the same text, in turns, with the sampling of continued text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from benchmarks.common import AUTO, PLAIN
from tokenswift import LLM, __version__
from tokenswift.config.sampling import CONTINUED
from tokenswift.turns import DecodingSide, take_turns

TURN = 25  # tokens of a turn


def rates(llm: LLM, prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Tokens a second of a prompt, and of both ways of decoding behind it."""
    state = llm.prefill(prompt)

    def side(strategy: str) -> DecodingSide:
        sampling = replace(CONTINUED, seed=1, min_tokens=new_tokens)
        return DecodingSide(iter(state.stream(new_tokens, strategy, sampling=sampling)))

    plain = side(PLAIN)
    auto = side(AUTO)
    for end, current in take_turns((plain, auto), range(TURN, new_tokens + TURN, TURN)):
        current.run_to(min(end, new_tokens))
    if plain.tokens != auto.tokens:
        sys.exit("drafting has changed the text")
    return {
        "reading": len(prompt) / state.seconds,
        "writing": len(plain.tokens) / plain.seconds,
        "drafting": len(auto.tokens) / auto.seconds,
    }


def main() -> None:
    """Answer lines until the input ends."""
    torch.set_num_threads(int(sys.argv[2]))
    llm = LLM(sys.argv[1])
    print(json.dumps(__version__), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = rates(llm, question["prompt"], question["new_tokens"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
