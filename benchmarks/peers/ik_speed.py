"""The speed of ik_llama.cpp: run by `benchmarks.lengths` with an interpreter that has ik_llama_cpp.

    PYTHON ik_speed.py FILE THREADS

The same lines as `llama_speed.py`: the prompt in batches, then one token after another, without
sampling. The program's own defaults but for the threads and flash attention.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import ik_llama_cpp  # pyright: ignore[reportMissingImports]
from ik_llama_cpp import _ctypes_api as api  # pyright: ignore[reportMissingImports]

BATCH = 512  # tokens of the prompt in a pass


def decode(context: object, tokens: Sequence[int], start: int) -> None:
    """One pass over tokens from a position on, and the logits of its last one."""
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = token
        batch.pos[i] = start + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = i == len(tokens) - 1
    failed = api.llama_decode(context, batch)
    api.llama_batch_free(batch)
    if failed:
        sys.exit("llama_decode failed")
    api.llama_get_logits_ith(context, len(tokens) - 1)


def rates(
    model: object, prompt: Sequence[int], continuation: Sequence[int], threads: int
) -> dict[str, float]:
    """Tokens a second of a prompt and of what follows it."""
    params = api.llama_context_default_params()
    params.n_ctx = len(prompt) + len(continuation) + 64
    params.n_batch = BATCH
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn = True
    context = api.llama_init_from_model(model, params)
    start = time.perf_counter()
    for first in range(0, len(prompt), BATCH):
        decode(context, prompt[first : first + BATCH], first)
    prompt_end = time.perf_counter()
    for number, token in enumerate(continuation):
        decode(context, [token], len(prompt) + number)
    end = time.perf_counter()
    api.llama_free(context)
    return {
        "reading": len(prompt) / (prompt_end - start),
        "writing": len(continuation) / (end - prompt_end),
    }


def main() -> None:
    """Answer lines until the input ends."""
    params = api.llama_model_default_params()
    model = api.llama_model_load_from_file(sys.argv[1].encode(), params)
    print(json.dumps(ik_llama_cpp.__version__), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = rates(model, question["prompt"], question["continuation"], int(sys.argv[2]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
