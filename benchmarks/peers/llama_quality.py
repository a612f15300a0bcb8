"""llama.cpp's judgement of texts: run by `benchmarks.quality` with an interpreter that has
llama_cpp.

    PYTHON llama_quality.py FILE THREADS

Prints its version, then for each line of JSON on its input, {"ids": tokens, "count": n}, the losses
of the last n tokens (−log of their probabilities, in nats) and the most probable tokens there.
"""

from __future__ import annotations

import json
import sys

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

ROWS = 256  # of a pass
F16 = 1  # ggml's number of the type


def losses_of(logits: np.ndarray, token: int) -> tuple[float, int]:
    """−log of a token's probability, and the most probable token."""
    most = logits.max()
    total = np.log(np.exp(logits.astype(np.float64) - most).sum()) + most
    return float(total - logits[token]), int(logits.argmax())


def judged(model: object, ids: list[int], count: int, threads: int) -> dict[str, list[float]]:
    """Losses and choices at the last ``count`` tokens."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(ids) + 64
    params.n_batch = ROWS
    params.n_threads = threads
    params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.type_k = F16
    params.type_v = F16
    context = llama_cpp.llama_init_from_model(model, params)
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    first = len(ids) - count - 1
    losses = []
    choices = []
    batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
    for start in range(0, len(ids) - 1, ROWS):
        rows = ids[start : min(start + ROWS, len(ids) - 1)]
        batch.n_tokens = len(rows)
        for row, token in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = start + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = start + row >= first
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        for row in range(len(rows)):
            if start + row < first:
                continue
            pointer = llama_cpp.llama_get_logits_ith(context, row)
            logits = np.ctypeslib.as_array(pointer, (width,))
            loss, choice = losses_of(logits, ids[start + row + 1])
            losses.append(loss)
            choices.append(choice)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return {"losses": losses, "choices": choices}


def main() -> None:
    """Answer lines until the input ends."""
    quiet = llama_cpp.llama_log_callback(lambda *message: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
    print(json.dumps(llama_cpp.__version__), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = judged(model, question["ids"], question["count"], int(sys.argv[2]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
