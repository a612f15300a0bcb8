"""Filling a store with hidden states: of given text, or of text that the model writes itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch

from tokenswift.train.options import DataOptions
from tokenswift.train.selftext import Backbone, continuations, pace_of
from tokenswift.train.store import HiddenStore

Report = Callable[[str], None]
SHORTER = "; fewer take less time: --tokens"


class Progress:
    """Lines of "done of total, ETA" at most every few seconds."""

    def __init__(self, what: str, total: int, start: int, report: Report, every: float = 10.0) -> None:
        self.what, self.total, self.start, self.report, self.every = what, total, start, report, every
        self.begun = self.told = time.monotonic()

    def at(self, done: int, share: float | None = None, hint: str = "") -> None:
        """Tell how far it is.

        Args:
            done: tokens, those of an earlier run included.
            share: of this run's time that they took; None: as many tokens, as much time.
            hint: what to add; told now, then, however young the last line is.
        """
        seconds = time.monotonic() - self.begun
        if not hint and self.begun + seconds - self.told < self.every and done < self.total:
            return
        self.told = self.begun + seconds
        fresh = done - self.start
        share = fresh / max(1, self.total - self.start) if share is None else share
        left = f", {duration(seconds * (1 - share) / share)} left" if 0 < share and done < self.total else ""
        rate = fresh / max(seconds, 1e-9)
        self.report(f"{self.what}: {done:,} of {self.total:,} tokens ({rate:,.0f}/s{left}){hint}")


def duration(seconds: float) -> str:
    """A time that is not known exactly, in words."""
    if seconds < 60:
        return "less than a minute"
    minutes = seconds / 60
    return f"about {minutes:.0f} min" if minutes < 100 else f"about {minutes / 60:.1f} hours"


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
    progress = Progress("hidden states", limit, store.tokens_stored, report)
    device, hint = backbone.model.device, SHORTER
    for group in _groups(islice(blocks, len(store.blocks), None), lambda length: batch):
        tokens = torch.tensor(group, device=device)
        store.append(tokens, backbone.hidden(tokens))
        progress.at(store.tokens_stored, hint=hint)
        hint = ""


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

    How long it will take is said before it begins, by a few steps, and again every ten seconds.

    The ends of the starts are learnt from too, as many tokens as the shortest has: their states come with
    the prefill. Of a longer one the tokens that the penalty still sees are kept beside. A batch is stored
    whole, so a killed run repeats at most one batch, with the same text.

    Args:
        starts: tokens to continue, shorter ones first.
    """
    new, shortest = options.new_tokens, min(map(len, starts))

    def together(length: int) -> int:
        return max(1, options.write_batch * (shortest + new) // (length + new))

    done, groups = 0, list[tuple[int, list[list[int]]]]()
    for group in _groups(starts, together):
        if done + len(group) > len(store.blocks):
            groups.append((done, group))
        done += len(group)
    if not groups:
        return
    tokens = sum(len(group) for _, group in groups) * new
    report(f"measuring how long the model takes to write {tokens:,} tokens")
    prompts = torch.tensor(groups[0][1], device=backbone.model.device)
    pace = pace_of(backbone, prompts, new, options.sampling)
    weights = [len(group) / together(len(group[0])) for _, group in groups]  # of a whole batch
    whole = sum(weights) * pace.seconds(new)
    report(f"the model writes {tokens:,} tokens to learn from: {duration(whole)}{SHORTER}")
    total = len(starts) * (new + shortest)
    progress = Progress("text by the model", total, store.tokens_stored, report)
    before = 0.0
    for (first, group), weight in zip(groups, weights, strict=True):
        written = store.tokens_stored
        for steps in _write(store, backbone, group, shortest, options, first):
            share = (before + weight * pace.seconds(steps)) / whole
            progress.at(written + len(group) * (shortest + steps - 1), share)
        before += weight * pace.seconds(new)


def _write(
    store: HiddenStore,
    backbone: Backbone,
    group: list[list[int]],
    shortest: int,
    options: DataOptions,
    first: int,
) -> Iterator[int]:
    """One batch: continue, and store; yields the steps done."""
    sampling, length = options.sampling, len(group[0])
    cut = max(0, length - shortest - sampling.window)  # tokens that nothing needs
    prompts = torch.tensor(group, device=backbone.model.device)
    tokens, states = [prompts[:, cut:]], []
    run = continuations(backbone, prompts, options.new_tokens, sampling, options.seed * 100_003 + first)
    for token, hidden in run:
        states.append(hidden if states else hidden[:, cut:])
        tokens.append(token[:, None])
        yield len(states)
    # The last token's own state is never computed, and no position needs it.
    store.append(torch.cat(tokens, dim=1)[:, :-1], torch.cat(states, dim=1), length - shortest - cut)
