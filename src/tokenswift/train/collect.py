"""Filling a store with hidden states: of given text, or of text that the model writes itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from tokenswift.config import SamplingParams
from tokenswift.train.data import passages
from tokenswift.train.selftext import Backbone, continuations
from tokenswift.train.store import HiddenStore

Report = Callable[[str], None]


class Progress:
    """Lines of "done of total, ETA" at most every few seconds."""

    def __init__(self, what: str, total: int, report: Report, every: float = 10.0) -> None:
        self.what, self.total, self.report, self.every = what, total, report, every
        self.begun = self.told = time.monotonic()
        self.start: int | None = None

    def at(self, done: int) -> None:
        """Tell how far it is."""
        now = time.monotonic()
        if self.start is None:
            self.start = done
        if now - self.told < self.every and done < self.total:
            return
        self.told = now
        rate = (done - self.start) / max(now - self.begun, 1e-9)
        left = f", {(self.total - done) / rate / 60:.1f} min left" if rate > 0 and done < self.total else ""
        self.report(f"{self.what}: {done:,} of {self.total:,} tokens ({rate:,.0f}/s{left})")


def fill_from_text(
    store: HiddenStore, backbone: Backbone, blocks: list[list[int]], batch: int, report: Report
) -> None:
    """Run the base model over blocks of text; blocks already in the store are skipped."""
    progress = Progress("hidden states", sum(map(len, blocks)), report)
    device = backbone.model.device
    for group in _groups(blocks[len(store.blocks) :], batch):
        tokens = torch.tensor(group, device=device)
        store.append(tokens, backbone.hidden(tokens))
        progress.at(store.tokens_stored)
    store.finish()


def _groups(blocks: list[list[int]], batch: int) -> Iterator[list[list[int]]]:
    """Consecutive blocks of one length, at most ``batch`` together."""
    group: list[list[int]] = []
    for block in blocks:
        if group and (len(group) == batch or len(block) != len(group[0])):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def fill_from_model(
    store: HiddenStore,
    backbone: Backbone,
    documents: list[list[int]] | None,
    *,
    texts: int,
    prompt: int,
    block: int,
    batch: int,
    sampling: SamplingParams,
    seed: int,
    start_token: int,
    report: Report,
) -> None:
    """Let the model write ``texts`` blocks, continuing passages of documents, or from nothing.

    The passages themselves are learnt from too: their states come with the prefill. A batch is stored
    whole, so a killed run repeats at most one batch, with the same text.
    """
    starts = passages(documents, texts, prompt, seed) if documents else [[start_token]] * texts
    progress = Progress("text by the model", texts * block, report)
    while len(store.blocks) < texts:
        done = len(store.blocks)
        group = torch.tensor(starts[done : done + batch], device=backbone.model.device)
        tokens, states = [group], []
        written = store.tokens_stored
        run = continuations(backbone, group, block - group.shape[1], sampling, seed * 100_003 + done)
        for token, hidden in run:
            tokens.append(token[:, None])
            states.append(hidden)
            progress.at(written + len(group) * (group.shape[1] + len(states) - 1))
        # The last token's own state is never computed, and no position needs it.
        all_tokens, all_states = torch.cat(tokens, dim=1)[:, :-1], torch.cat(states, dim=1)
        store.append(all_tokens, all_states)
        del tokens, states, all_tokens, all_states  # before the next batch's
    store.finish()
