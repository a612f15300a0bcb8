"""The byte tokenizer of the fixtures with a chat template, with and without a BOS of its own."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_tokenizer
from tests.tiny import byte_model

#: ``<s>system: …\nuser: …\nassistant:``; it refuses an unknown role as templates do
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def chat_tokenizer(adds_bos: bool = True) -> Any:
    """The byte tokenizer with :data:`TEMPLATE`; with ``adds_bos`` every text gets a ``<s>`` (id
    256)."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return tokenizer


#: as Hermes' and Qwen's: calls in tags, results of the role "tool"; it ends in "!" where a result
#: came last
HERMES_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}{{ '\\n' "
    "}}{% endfor %}"
    "assistant{{ '!' if messages[-1].role == 'tool' else ':' }}"
)
#: as Qwen 3's: thoughts of earlier turns are left out, and ``enable_thinking`` false asks for none
THINKING = (
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{ m.role + ':' }}{% if m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ said + '\\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% if enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
#: a token of the vocabulary → the one that `calling_model` writes after it, unless a grammar
#: forbids that
NEXT = {":": "<tool_call>", "!": "o", "o": "k", "k": "</s>", ">": "</s>"}


#: the same of a model that thinks: ``<think>y</think>``, then "o"
THINKS: dict[str, str] = dict(
    zip((":", *"<think>y", "</think>", "o"), (*"<think>y", "</think>", "o", "</s>"), strict=True)
)


def calling_tokenizer(template: str = HERMES_TEMPLATE, mark: str = "<tool_call>") -> Any:
    """The byte tokenizer with a template, and ``mark`` for its last token."""
    fields = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = fields["model"]["vocab"]
    vocabulary[mark] = vocabulary.pop("<x>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    return tokenizer


def calling_model(
    positions: int = 2048, tokenizer: Any = None, after: dict[str, str] = NEXT
) -> Any:
    """A model that calls a tool when it is asked, and says "ok" to its result: what it writes
    follows from the last token alone (``after``)."""
    model = byte_model(max_position_embeddings=positions, tie_word_embeddings=False)
    vocab = (tokenizer or calling_tokenizer()).get_vocab()
    with torch.no_grad():
        for dimension, (token, following) in enumerate(after.items()):
            model.model.embed_tokens.weight[:, dimension] = 0
            model.lm_head.weight[:, dimension] = 0
            model.model.embed_tokens.weight[vocab[token], dimension] = 20
            model.lm_head.weight[vocab[following], dimension] = 9
    return model


def thinking_tokenizer() -> Any:
    """The byte tokenizer of a model that thinks."""
    return calling_tokenizer(THINKING, "</think>")


def thinking_model() -> Any:
    """A model that thinks "y" and answers "o"."""
    return calling_model(512, thinking_tokenizer(), THINKS)


#: how Qwen's tokenizer cuts texts, and some of its merges
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MERGES = [
    ("{", '"'),
    ('"', ":"),
    ("<", "/"),
    ("t", "o"),
    ("o", "l"),
    ("to", "ol"),
    ("_", "c"),
    ("Ċ", "Ċ"),
]
MARKS = ("<tool_call>", "</tool_call>")


def marked_tokenizer(special: bool) -> Any:
    """A byte-level tokenizer in which the marks of calls are added tokens: not special as in Qwen
    2.5, whose other added tokens are, or special."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    cut = pre_tokenizers.Split(Regex(CUT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|python_tag|>"])
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = HERMES_TEMPLATE
    return tokenizer
