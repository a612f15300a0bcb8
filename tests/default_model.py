"""The default model, loaded once in a process for all tests that only generate with it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenswift
from tokenswift import LLM

PROMPTS = Path(tokenswift.__file__).parent / "data" / "prompts"


@cache
def default_llm(dtype: str = "float32", heads: str = "auto") -> LLM:
    """The default model on the CPU with this processor's own kernels; do not change it."""
    return LLM("smollm2-135m", dtype=dtype, device="cpu", heads=heads)


def prompt_of(name: str, length: int) -> list[int]:
    """The first tokens of a packaged text."""
    ids = default_llm().encode((PROMPTS / f"{name}.txt").read_text(encoding="utf-8"))
    assert len(ids) >= length, f"{name} has {len(ids)} tokens"
    return ids[:length]
