"""Plain and automatic decoding by one checkout: run by `benchmarks.versions`, which puts the
checkout's sources before all other modules.

    python checkout_modes.py BOOK DTYPE CONTEXT TOKENS STRATEGY

Prints {"plain": milliseconds a token, "automatic": the same of STRATEGY}, of the default model.
Only what earlier versions have, too, may be called here.
"""

from __future__ import annotations

import json
import sys

from tokenswift import LLM, SamplingParams

FRONT = 20_000  # characters of a book that are left out: title, contents
WARM = 32  # tokens before the clock runs


def main() -> None:
    """Measure, and print a line of JSON."""
    book, dtype, context_text, tokens_text, automatic = sys.argv[1:]
    context = int(context_text)
    tokens = int(tokens_text)
    llm = LLM("smollm2-135m", dtype=dtype)
    with open(book, encoding="utf-8") as file:
        text = file.read()[FRONT : FRONT + 8 * context]
    ids = llm.encode(text)[:context]
    milliseconds = {}
    for mode, strategy in (("plain", "autoregressive"), ("automatic", automatic)):
        llm.generate(ids, WARM, strategy, sampling=SamplingParams(seed=0), ignore_eos=True)
        done = llm.generate(ids, tokens, strategy, sampling=SamplingParams(seed=1), ignore_eos=True)
        milliseconds[mode] = 1000 * done.metrics.seconds / len(done.token_ids)
    print(json.dumps(milliseconds))


if __name__ == "__main__":
    main()
