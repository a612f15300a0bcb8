"""Filling a store with hidden states: of given text, or of text that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.train.data import SHORTEST, blocks, passages, prefix_of
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.selftext import Backbone, continuations
from tokenswift.train.store import HiddenStore
from tokenswift.types import InputError, OnProgress

Report = Callable[[str], None]
LEAST = 256  # tokens of text that anything can be learnt from


def collect(
    model: Any, tokenizer: Any, data: DataOptions, job: Job, store: HiddenStore, on_progress: OnProgress
) -> None:
    """Fill a store, or the rest of it. A batch is stored whole, so a killed run repeats at most one batch,
    with the same text.

    The ends of prompts are learnt from, too, as many tokens as the shortest prompt has: their states come
    with the prefill. Of a longer one the tokens that the penalty still sees are kept beside.

    Raises:
        InputError: too little text, or a tokenizer of another model.
        OSError: the disk takes no more.
    """
    backbone, new = Backbone(model), data.new_tokens if data.writes else 0
    texts = _texts(model, tokenizer, data, job.training.seed)
    first = list(texts if data.writes else islice(texts, LEAST))
    if (found := sum(map(len, first))) < LEAST and not data.writes:
        raise InputError(
            f"--data {data.data} gives {found} tokens to learn from, in pieces of {SHORTEST} and more; "
            f"at least {LEAST} are needed"
        )
    shortest = len(first[0]) if data.writes else 0
    vocab_size, done = model.get_input_embeddings().weight.shape[0], 0
    total = len(first) * (shortest + new) if data.writes else data.tokens

    def tell(done: int) -> None:
        on_progress("write" if data.writes else "states", min(done, total - 1), total)

    at_once = data.write_batch * data.sequence_length // (1 if data.writes else 4)  # tokens
    for group in _groups(chain(first, texts), lambda length: max(1, at_once // (length + new))):
        done += len(group)
        if done <= len(store.blocks):
            continue
        for text in group:
            check_tokens(text, vocab_size)
        prompts = torch.tensor(group, device=model.device)
        if data.writes:
            seed = job.training.seed * 100_003 + done - len(group)
            _write(store, backbone, prompts, shortest, new, job.sampling, seed, tell)
        else:
            store.append(prompts, backbone.hidden(prompts))
            tell(store.tokens_stored)
    store.finish()


def _texts(model: Any, tokenizer: Any, data: DataOptions, seed: int) -> Iterator[list[int]]:
    """The texts to read, or those to continue, shorter ones first."""
    prefix = prefix_of(tokenizer)
    if not data.writes:
        yield from blocks(data.data, tokenizer, data.tokens, data.sequence_length, prefix)
        return
    count = max(1, data.tokens // data.new_tokens)
    if data.continued:
        lengths = [data.prompt_lengths[i * len(data.prompt_lengths) // count] for i in range(count)]
        yield from passages(data.data, tokenizer, lengths, prefix, seed)
    else:
        known = (tokenizer.bos_token_id, model.config.bos_token_id, model.config.eos_token_id)
        yield from [prefix or [next((token for token in known if isinstance(token, int)), 0)]] * count


def _groups(texts: Iterable[list[int]], most: Callable[[int], int]) -> Iterator[list[list[int]]]:
    """Consecutive texts of one length, at most ``most(length)`` together."""
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) == most(len(group[0])) or len(text) != len(group[0])):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _write(
    store: HiddenStore,
    backbone: Backbone,
    prompts: Tensor,
    shortest: int,
    new: int,
    sampling: SamplingParams,
    seed: int,
    tell: Callable[[int], None],
) -> None:
    """Let the model continue a batch of prompts, and store what it wrote and saw."""
    count, length = prompts.shape
    cut = max(0, length - shortest - sampling.window)  # tokens that nothing needs
    tokens, states, before = [prompts[:, cut:]], [], store.tokens_stored
    for token, hidden in continuations(backbone, prompts, new, sampling, seed):
        states.append(hidden if states else hidden[:, cut:])
        tokens.append(token[:, None])
        tell(before + count * (shortest + len(states) - 1))
    # The last token's own state is never computed, and no position needs it.
    store.append(torch.cat(tokens, dim=1)[:, :-1], torch.cat(states, dim=1), length - shortest - cut)
