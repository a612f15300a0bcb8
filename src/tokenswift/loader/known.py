"""Good small models of the native families by name, with their licences, and what drafts for them. Light."""

from __future__ import annotations

from dataclasses import dataclass

from tokenswift.loader import draft, embedded

APACHE, LLAMA = "Apache-2.0", "Llama 3.2 Community License"


@dataclass(frozen=True, slots=True)
class Known:
    """A model.

    Attributes:
        name: as ``LLM`` and ``--model`` take it.
        parameters: how many, in millions.
        licence: by its SPDX name where it has one.
        draft: a smaller model with the same tokenizer and vocabulary, for ``draft_model``; None: none is
            known.
        heads: kinds of shipped heads.
    """

    name: str
    parameters: int
    licence: str
    draft: str | None = None
    heads: tuple[str, ...] = ()


KNOWN = (
    Known(embedded.NAME, 135, APACHE, draft.NAME, ("conditioned",)),
    Known("HuggingFaceTB/SmolLM2-360M-Instruct", 362, APACHE, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    Known("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1711, APACHE, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    Known("Qwen/Qwen2.5-0.5B-Instruct", 494, APACHE),
    Known("Qwen/Qwen2.5-1.5B-Instruct", 1544, APACHE, "Qwen/Qwen2.5-0.5B-Instruct"),
    Known("Qwen/Qwen3-0.6B", 596, APACHE),
    Known("Qwen/Qwen3-1.7B", 1721, APACHE, "Qwen/Qwen3-0.6B"),
    Known("Qwen/Qwen3-4B", 4022, APACHE, "Qwen/Qwen3-0.6B"),
    Known("meta-llama/Llama-3.2-1B-Instruct", 1236, LLAMA),
    Known("meta-llama/Llama-3.2-3B-Instruct", 3213, LLAMA, "meta-llama/Llama-3.2-1B-Instruct"),
)
