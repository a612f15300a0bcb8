"""llama.cpp's speed: run by `benchmarks.real` with an interpreter that has llama_cpp.

    PYTHON llama_speed.py FILE THREADS [KEYS]

KEYS is the type of keys and values, f16 or q8_0. Prints its version, then for each line of JSON on
its input, {"prompt": tokens, "continuation": tokens}, the tokens a second of both: the prompt in
batches, then one token after another. With {"samples": places} besides, it is a list of tokens a
second, one for each place of the continuation: 50 tokens there one after another, those between in
batches. `llama_decode` runs them, without sampling.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

import llama_cpp  # pyright: ignore[reportMissingImports]

BATCH = 512  # tokens of the prompt in a pass
SAMPLE = 50  # tokens that are timed at a place
TYPES = {"f16": 1, "q8_0": 8}  # numbers of ggml's types


def version() -> str:
    """llama_cpp's version, with the abilities of the processor that it uses."""
    system_info = llama_cpp.llama_print_system_info().decode()
    abilities = [part.split(" = ")[0].split(": ")[-1].strip() for part in system_info.split("|")]
    return f"{llama_cpp.__version__} ({' '.join(filter(None, abilities))})"


def decode(context: object, tokens: Sequence[int]) -> None:
    """One pass, and the logits of its last token."""
    array = (llama_cpp.llama_token * len(tokens))()
    array[:] = tokens
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))):
        sys.exit("llama_decode failed")
    llama_cpp.llama_get_logits_ith(context, -1)


def read(context: object, tokens: Sequence[int]) -> float:
    """Seconds to run tokens in batches."""
    start = time.perf_counter()
    for first in range(0, len(tokens), BATCH):
        decode(context, tokens[first : first + BATCH])
    return time.perf_counter() - start


def write(context: object, tokens: Sequence[int]) -> float:
    """Seconds to run tokens one after another."""
    start = time.perf_counter()
    for token in tokens:
        decode(context, [token])
    return time.perf_counter() - start


def new_context(model: object, size: int, threads: int, keys: str) -> object:
    """Room for so many tokens."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = size + 64
    params.n_batch = BATCH
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.type_k = TYPES[keys]
    params.type_v = TYPES[keys]
    return llama_cpp.llama_init_from_model(model, params)


def rates(context: object, prompt: Sequence[int], continuation: Sequence[int]) -> dict[str, float]:
    """Tokens a second of a prompt and of what follows it."""
    reading = read(context, prompt)
    writing = write(context, continuation)
    return {"reading": len(prompt) / reading, "writing": len(continuation) / writing}


def sampled_rates(
    context: object, prompt: Sequence[int], continuation: Sequence[int], samples: Sequence[int]
) -> list[float]:
    """Tokens a second at places of a continuation."""
    read(context, prompt)
    speeds = []
    known = 0
    for place in samples:
        read(context, continuation[known:place])
        timed = continuation[place : place + SAMPLE]
        speeds.append(len(timed) / write(context, timed))
        known = place + len(timed)
    return speeds


def answer(model: object, question: Mapping[str, Sequence[int]], threads: int, keys: str) -> object:
    """What is answered to a line."""
    prompt = question["prompt"]
    continuation = question["continuation"]
    context = new_context(model, len(prompt) + len(continuation), threads, keys)
    if "samples" in question:
        speeds = sampled_rates(context, prompt, continuation, question["samples"])
    else:
        speeds = rates(context, prompt, continuation)
    llama_cpp.llama_free(context)
    return speeds


def main() -> None:
    """Answer lines until the input ends."""
    quiet = llama_cpp.llama_log_callback(lambda *message: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
    threads = int(sys.argv[2])
    keys = sys.argv[3] if len(sys.argv) > 3 else "f16"
    print(json.dumps(version()), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line), threads, keys)), flush=True)


if __name__ == "__main__":
    main()
