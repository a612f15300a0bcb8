"""llama.cpp's speed: run by `benchmarks.real` with an interpreter that has llama_cpp.

    PYTHON llama_speed.py FILE THREADS [KEYS]

KEYS is the type of keys and values, f16 or q8_0. Prints its version, then for each line of JSON on
its input, {"prompt": tokens, "continuation": tokens}, the tokens a second of both: the prompt in
batches, then one token after another. `llama_decode` runs them, without sampling.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import llama_cpp  # pyright: ignore[reportMissingImports]

BATCH = 512  # tokens of the prompt in a pass
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


def rates(
    model: object, prompt: Sequence[int], continuation: Sequence[int], threads: int, keys: str
) -> dict[str, float]:
    """Tokens a second of a prompt and of what follows it."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(prompt) + len(continuation) + 64
    params.n_batch = BATCH
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.type_k = TYPES[keys]
    params.type_v = TYPES[keys]
    context = llama_cpp.llama_init_from_model(model, params)
    start = time.perf_counter()
    for first in range(0, len(prompt), BATCH):
        decode(context, prompt[first : first + BATCH])
    prompt_end = time.perf_counter()
    for token in continuation:
        decode(context, [token])
    end = time.perf_counter()
    llama_cpp.llama_free(context)
    return {
        "reading": len(prompt) / (prompt_end - start),
        "writing": len(continuation) / (end - prompt_end),
    }


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
        question = json.loads(line)
        answer = rates(model, question["prompt"], question["continuation"], threads, keys)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
