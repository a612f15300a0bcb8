"""A prompt for a model: its token ids, and the sampling of what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenswift.chat.prompts import Prompt, is_chat, prompt_ids
from tokenswift.config.sampling import CONTINUED, SamplingParams
from tokenswift.speculation.resources import Resources


def encode(
    resources: Resources,
    prompt: Prompt,
    template_options: Mapping[str, object] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    name: str = "prompt",
) -> list[int]:
    """Token ids of a prompt; the arguments are those of `chat.prompts.prompt_ids`.

    Raises:
        InputError: naming what is wrong with the prompt.
    """
    tokenizer = resources.source.tokenizer
    rows = resources.target.vocab_size
    return prompt_ids(prompt, tokenizer, rows, name, tools, template_options)


def default_sampling(resources: Resources, prompt: Prompt) -> SamplingParams:
    """The sampling of a prompt for which none is given (see ``LLM.default_sampling``)."""
    return resources.source.answers if is_chat(prompt) else CONTINUED
