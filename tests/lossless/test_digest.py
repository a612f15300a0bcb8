"""The tokens of 28 short texts by the default model are those that were kept before the package
moved.

A chat, prose, a grammar and a batch of four prompts, drafted adaptively, in float32, bfloat16,
int8, and over the GGUF file's own blocks. What is pinned is tokens alone: steps and drafts may
change. The kernels give the same bits on every processor, but for bfloat16, which has a second set
of hashes where a processor multiplies pairs of bfloat16 by itself. ``python -m
tests.lossless.test_digest`` writes tests/data/digest.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lossless import frozen
from tokenswift import LLM, SamplingParams
from tokenswift.kernels.cpu import library

FILE = Path(__file__).parents[1] / "data" / "digest.json"
TYPES = {
    "float32": {"dtype": "float32", "weights": "float32"},
    "bfloat16": {"dtype": "bfloat16", "weights": "bfloat16"},
    "int8": {"dtype": "int8", "weights": "q8_0"},
    "gguf": {"dtype": "float32", "weights": "stored"},
}
SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["town", "people"],
    "additionalProperties": False,
}
BATCH = ("The harbour lay still", "def fibonacci(n):", "1, 2, 3, 4, 5,", "Dear madam, dear sir,")
NEW = 24


def digests(kind: str) -> dict[str, str]:
    """Name of a case → hash of its tokens, in one type."""
    types: dict[str, Any] = TYPES[kind]
    with LLM("smollm2-135m", device="cpu", **types) as llm:
        chat = [{"role": "user", "content": "Name three rivers of Europe."}]
        prose = (frozen.PROMPTS / "harbour.txt").read_text(encoding="utf-8")
        schema = {"type": "json_schema", "schema": SCHEMA}
        texts = {
            "chat": [llm.generate(chat, NEW)],
            "prose": [
                llm.generate(llm.encode(prose)[:120], 2 * NEW, sampling=SamplingParams(seed=11))
            ],
            "grammar": [llm.generate("A town as JSON: ", 2 * NEW, response_format=schema, seed=3)],
            "batch": llm.generate_many(BATCH, NEW, at_once=4, seed=5),
        }
    return {
        name: hashlib.sha256(repr([out.token_ids for out in outs]).encode()).hexdigest()[:16]
        for name, outs in texts.items()
    }


@pytest.mark.model
@pytest.mark.parametrize("kind", TYPES)
def test_texts_are_as_they_were(kind: str, embedded: str) -> None:
    frozen_digests = json.loads(FILE.read_text(encoding="utf-8"))
    wanted = library.kernels_wanted()
    assert (
        digests(kind)
        == frozen_digests[frozen.arithmetic(frozen.OWN if wanted == "auto" else wanted, kind)]
    )


def main() -> None:
    """Write the file with what this processor's own kernels say, and in bfloat16 those of AVX2,
    too."""
    frozen_digests = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for set_of_instructions, types in ((frozen.OWN, tuple(TYPES)), ("avx2", ("bfloat16",))):
        if set_of_instructions in frozen.kinds() and frozen.use(set_of_instructions):
            for kind in types:
                frozen_digests[frozen.arithmetic(set_of_instructions, kind)] = digests(kind)
                print(set_of_instructions, kind, frozen_digests, file=sys.stderr)
    FILE.write_text(json.dumps(frozen_digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
