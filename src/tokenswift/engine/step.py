"""The decode loop (paper, Algorithm 1): draft, verify, choose, commit, observe.

Every strategy runs through this loop, plain decoding too (its tree is the bare root). What comes out
is decided by the target model and the acceptance rule alone; a strategy decides only how fast. A step
advances a list of texts by one verify pass over all their trees; each text is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenswift.interfaces import Pass, Segment, Strategy, TokenSequence
from tokenswift.metrics import PREFILL, Meter
from tokenswift.sampling.accept import accept_exact, accept_published
from tokenswift.sampling.choice import Sampler
from tokenswift.types import Accepted, DraftTree, OnProgress, Step


def prefill(sequence: TokenSequence, on_progress: OnProgress | None = None) -> None:
    """Run the prompt, all but its last token (the first root), into the full cache.

    ``on_progress`` is told of the stage "prompt", in tokens.
    """
    known = sequence.tokens[:-1]
    if known:
        newest = sequence.model.prefill(known, sequence.cache, on_progress)
        sequence.newest, sequence.newest_row = newest, len(newest.hidden) - 1


@dataclass(slots=True)
class Text:
    """A text under way, as the loop sees it.

    Attributes:
        sequence: its state, after the prompt's prefill.
        strategy: what drafts.
        sampler: the choice rule.
        room: new tokens that may still come.
        eos: token ids that end the text (the token itself is part of the output); may be empty.
        meter: collects counts and the seconds of each phase.
        ended: whether one of ``eos`` came.
    """

    sequence: TokenSequence
    strategy: Strategy
    sampler: Sampler
    room: int
    eos: Collection[int]
    meter: Meter
    ended: bool = False

    def begin(self) -> None:
        """The strategy's own reading of the prompt; once, before the first step."""
        with self.meter.phase(PREFILL):
            self.strategy.begin(self.sequence)
        self.meter.lap()

    @property
    def is_done(self) -> bool:
        """Whether no further token may come."""
        return self.ended or self.room < 1


def decode(
    sequence: TokenSequence,
    strategy: Strategy,
    sampler: Sampler,
    max_new_tokens: int,
    eos: Collection[int],
    meter: Meter,
) -> Iterator[Step]:
    """Generate up to ``max_new_tokens`` tokens after a prefilled sequence; the arguments are those of
    :class:`Text`."""
    text = Text(sequence, strategy, sampler, max_new_tokens, eos, meter)
    text.begin()
    while not text.is_done:
        yield advance([text])[0]


def advance(texts: Sequence[Text]) -> list[Step]:
    """One step of each text, none of them done, with one verify pass for all.

    The times of a step are its text's own; those of the pass count for every text in it.
    """
    trees: list[DraftTree] = []
    for text in texts:
        with text.meter.phase("draft"):
            trees.append(text.strategy.draft(text.sequence))
    with ExitStack() as phases:
        for text in texts:
            phases.enter_context(text.meter.phase("verify"))
        verified = _verified([text.sequence for text in texts], trees)
    return [
        _finished(text, tree, result, logits)
        for text, tree, (result, logits) in zip(texts, trees, verified, strict=True)
    ]


def _verified(sequences: Sequence[TokenSequence], trees: Sequence[DraftTree]) -> list[tuple[Pass, Tensor]]:
    """The pass over the nodes of each tree, and their logits (n, V)."""
    model = sequences[0].model
    segments: list[Segment] = []
    for sequence, tree in zip(sequences, trees, strict=True):
        root_position = len(sequence.tokens) - 1
        tokens = torch.tensor(tree.tokens, device=model.device)
        positions = torch.tensor(tree.depths, device=model.device) + root_position
        segments.append(Segment(tokens, positions, sequence.cache, tree.parents))
    if len(segments) == 1:
        one = segments[0]
        result = model.forward(one.tokens, one.positions, one.cache, one.parents)
        return [(result, model.logits(result.hidden))]
    passes = model.forward_all(segments)
    logits = model.logits(torch.cat([each.hidden for each in passes]))
    return list(zip(passes, logits.split([len(tree) for tree in trees]), strict=True))


def _finished(text: Text, tree: DraftTree, result: Pass, logits: Tensor) -> Step:
    """Choose, commit and observe."""
    sequence, strategy, sampler, meter = text.sequence, text.strategy, text.sampler, text.meter
    with meter.phase("choose"):
        if strategy.acceptance == "published":
            accepted = accept_published(tree, logits, sequence.tokens, sampler)
        else:
            accepted = accept_exact(tree, logits, sequence.tokens, sampler, all_rows=not sampler.walks)
    with meter.phase("commit"):
        new, text.ended = _new_tokens(tree, accepted, text.room, text.eos)
        nodes = accepted.nodes[: len(new)]  # the last new token is the next root, not cached yet
        sequence.cache.commit(nodes)
        sequence.tokens.extend(new)
        sequence.newest, sequence.newest_row = result, nodes[-1]
        text.room -= len(new)
    taken = accepted.nodes[1 : len(new) + 1]
    step = Step(
        token_ids=tuple(new),
        drafted=len(tree) - 1,
        accepted=len(taken),
        ngram_accepted=sum(tree.sources[node] == "ngram" for node in taken),
        gamma=tree.gamma,
        sources=(*(tree.sources[node] for node in taken), "target")[: len(new)],
        times=(times := meter.lap()),
    )
    with meter.phase("observe"):
        strategy.observe(sequence, step, nodes)
    meter.add(step)
    times |= meter.lap()
    return step


def _new_tokens(
    tree: DraftTree, accepted: Accepted, room: int, eos: Collection[int]
) -> tuple[list[int], bool]:
    """The step's tokens, cut to ``room`` and after the first EOS; whether an EOS ended the text."""
    new = [tree.tokens[node] for node in accepted.nodes[1:]] + [accepted.token]
    new = new[:room]
    for i, token in enumerate(new):
        if token in eos:
            return new[: i + 1], True
    return new, False
