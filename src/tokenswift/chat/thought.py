"""What a model thinks before it answers, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenswift.chat.families import template_of
from tokenswift.grammar import CLOSE, OPEN

TAIL = 16  # tokens at a prompt's end, among which the mark is


def thought_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Where the thought of an answer begins: "may" (the answer may begin with one), "begun" (the prompt has),
    "" (there is none).

    Args:
        prompt: ids of a chat.
    """
    if CLOSE not in template_of(tokenizer):
        return ""
    end = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    return "begun" if end.endswith(OPEN) else "" if end.endswith(CLOSE) else "may"
