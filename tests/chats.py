"""The byte tokenizer of the fixtures with a chat template, with and without a BOS of its own."""

from __future__ import annotations

from typing import Any

from tokenizers import processors

from tests.conftest import tiny_tokenizer

#: ``<s>system: …\nuser: …\nassistant:``; it refuses an unknown role as templates do
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def chat_tokenizer(adds_bos: bool = True) -> Any:
    """The byte tokenizer with :data:`TEMPLATE`; with ``adds_bos`` every text gets a ``<s>`` (id 256)."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return tokenizer
