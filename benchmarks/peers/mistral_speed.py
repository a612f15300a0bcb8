"""The speed of mistral.rs: run by `benchmarks.lengths` with an interpreter that has mistralrs.

    PYTHON mistral_speed.py FILE THREADS

Prints its version, then for each line of JSON on its input, {"text": prompt, "new_tokens": number},
the tokens a second of the prompt and of greedy decoding behind it, as it counts them itself.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Answer lines until the input ends."""
    os.environ["RAYON_NUM_THREADS"] = sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log goes to standard output
    from mistralrs import CompletionRequest, Runner, Which  # pyright: ignore[reportMissingImports]

    file = Path(sys.argv[1])
    runner = Runner(
        which=Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name),
        prefix_cache_n=0,
        no_paged_attn=True,
    )
    print(json.dumps(version("mistralrs")), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        request = CompletionRequest(
            prompt=question["text"],
            model="default",
            max_tokens=question["new_tokens"],
            temperature=0.0,
            ignore_eos=True,
        )
        usage = runner.send_completion_request(request).usage
        answer = {"reading": usage.avg_prompt_tok_per_sec, "writing": usage.avg_compl_tok_per_sec}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
