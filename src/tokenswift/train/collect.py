"""Filling a store with hidden states: of given text, or of text that the model writes itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch

from tokenswift.train.options import DataOptions
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
    store: HiddenStore,
    backbone: Backbone,
    blocks: Iterator[list[int]],
    batch: int,
    limit: int,
    report: Report,
) -> None:
    """Run the base model over blocks of text as they come; blocks already in the store are skipped.

    Args:
        limit: about how many tokens the blocks hold, for the progress lines.
    """
    progress = Progress("hidden states", limit, report)
    device = backbone.model.device
    for group in _groups(islice(blocks, len(store.blocks), None), lambda length: batch):
        tokens = torch.tensor(group, device=device)
        store.append(tokens, backbone.hidden(tokens))
        progress.at(store.tokens_stored)


def _groups(blocks: Iterable[list[int]], most: Callable[[int], int]) -> Iterator[list[list[int]]]:
    """Consecutive blocks of one length, at most ``most(length)`` together."""
    group: list[list[int]] = []
    for block in blocks:
        if group and (len(group) == most(len(group[0])) or len(block) != len(group[0])):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def fill_from_model(
    store: HiddenStore,
    backbone: Backbone,
    starts: list[list[int]],
    options: DataOptions,
    report: Report,
) -> None:
    """Let the model continue every start by `DataOptions.new_tokens` tokens.

    The ends of the starts are learnt from too, as many tokens as the shortest has: their states come with
    the prefill. Of a longer one the tokens that the penalty still sees are kept beside. A batch is stored
    whole, so a killed run repeats at most one batch, with the same text.

    Args:
        starts: tokens to continue, shorter ones first.
    """
    new, shortest = options.new_tokens, min(map(len, starts))
    progress = Progress("text by the model", len(starts) * (new + shortest), report)

    def together(length: int) -> int:
        return max(1, options.write_batch * (shortest + new) // (length + new))

    done = 0
    for group in _groups(starts, together):
        done += len(group)
        if done <= len(store.blocks):
            continue
        _write(store, backbone, group, shortest, options, done - len(group), progress)


def _write(
    store: HiddenStore,
    backbone: Backbone,
    group: list[list[int]],
    shortest: int,
    options: DataOptions,
    first: int,
    progress: Progress,
) -> None:
    """One batch: continue, and store."""
    sampling, length = options.sampling, len(group[0])
    cut = max(0, length - shortest - sampling.window)  # tokens that nothing needs
    prompts = torch.tensor(group, device=backbone.model.device)
    tokens, states = [prompts[:, cut:]], []
    written = store.tokens_stored
    run = continuations(backbone, prompts, options.new_tokens, sampling, options.seed * 100_003 + first)
    for token, hidden in run:
        states.append(hidden if states else hidden[:, cut:])
        tokens.append(token[:, None])
        progress.at(written + len(group) * (shortest + len(states) - 1))
    # The last token's own state is never computed, and no position needs it.
    store.append(torch.cat(tokens, dim=1)[:, :-1], torch.cat(states, dim=1), length - shortest - cut)
