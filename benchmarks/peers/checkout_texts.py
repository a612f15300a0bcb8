"""Several texts at once by one checkout: run by `benchmarks.several_texts`, which puts the
checkout's sources before all other modules.

    python checkout_texts.py MODEL COUNT

Prints the tokens a second of COUNT texts together, from the 10th to the 110th token of plain
decoding. Only what earlier versions have, too, may be called here.
"""

from __future__ import annotations

import sys
import time

from tokenswift import LLM

WORDS = ("ship", "dog", "king", "tree", "door", "clock", "river", "stone")
WARM = 8
FIRST = 10
LAST = 110


def seconds_of(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds in which the prompts are read and so many tokens behind each are written."""
    plain = "autoregressive"
    start = time.perf_counter()
    if len(prompts) == 1:
        llm.generate(prompts[0], new_tokens, plain, temperature=0.7, seed=1, ignore_eos=True)
    else:
        llm.generate_many(prompts, new_tokens, plain, temperature=0.7, seed=1, ignore_eos=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print the rate."""
    count = int(sys.argv[2])
    llm = LLM(sys.argv[1])
    prompts = [
        llm.encode([{"role": "user", "content": f"Write a story about a {word}"}])
        for word in WORDS[:count]
    ]
    seconds_of(llm, prompts, WARM)
    before = seconds_of(llm, prompts, FIRST)
    after = seconds_of(llm, prompts, LAST)
    print((LAST - FIRST) * count / (after - before))


if __name__ == "__main__":
    main()
