"""The decode loop (paper, Algorithm 1): draft, verify, choose, commit, observe.

Every strategy runs through this loop, plain decoding too (its tree is the bare root). What comes out
is decided by the target model and the acceptance rule alone; a strategy decides only how fast. A step
advances a list of texts by one verify pass over all their trees; each text is what it would be alone, and
what fails in one of them ends that one alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from tokenswift.interfaces import Pass, Segment
from tokenswift.kv.full import to_device
from tokenswift.kv.select import OBSERVED
from tokenswift.metrics import PREFILL, Meter
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.accept import accept_exact, accept_published
from tokenswift.spec.strategy import ALONE, BatchLoad, Strategy, TokenSequence
from tokenswift.types import Accepted, DraftTree, OnProgress, Step

logger = logging.getLogger("tokenswift")
_SLOW = 1 / 16  # weight of a step in a text's running means
_REDECODED = 64  # rows of a pass that decodes again what a model wrote


def prefill(sequence: TokenSequence, on_progress: OnProgress | None = None, rows: int | None = None) -> int:
    """Run the prompt, all but its last token (the first root), into the full cache, from where that ends.

    Args:
        on_progress: told of the stage "prompt", in tokens.
        rows: about as many rows as are wanted now; None: all. A model whose prompts' bits depend on what a
            pass holds is given the passes that it would make of the whole.
    Returns:
        Tokens that are left.
    """
    at, known, model = sequence.cache.length, len(sequence.tokens) - 1, sequence.model
    redecodes = model.equal_bits and not model.prefill_keeps_bits
    border = min(known, sequence.prompt_tokens - 1) if redecodes else known
    end = border
    if rows is not None and not model.prefill_keeps_bits:
        chunk = model.prefill_chunk
        end = border if border - at <= chunk + OBSERVED else at + chunk
    elif rows is not None:
        end = min(border, at + rows)
    report = on_progress
    if report is not None and (at or border < known):
        report = partial(_further, report, at, known)
    if end > at:
        ends, told, features = end > border - OBSERVED, sequence.on_read, sequence.features
        newest = model.prefill(sequence.tokens[at:end], sequence.cache, report, ends, told, features)
        _take(sequence, newest, at)
        if rows is not None:
            return known - end
    while sequence.cache.length < known:
        _decode_again(sequence)
        if report is not None:
            report("prompt", sequence.cache.length - at, known - at)
        if rows is not None:
            break
    return known - sequence.cache.length


def _decode_again(sequence: TokenSequence) -> None:
    """Run what a model wrote before as it was decoded, up to so many rows."""
    at = sequence.cache.length
    rows = torch.tensor(sequence.tokens[at:-1][:_REDECODED])
    positions, parents = torch.arange(at, at + len(rows)), list(range(-1, len(rows) - 1))
    result = sequence.model.forward(rows, positions, sequence.cache, parents)
    _commit(sequence, result, len(rows))


def _commit(sequence: TokenSequence, result: Pass, rows: int) -> None:
    """Keep all rows of a pass that read on in a text."""
    at = sequence.cache.length
    if sequence.on_read is not None:
        sequence.on_read(at, result.hidden)
    if sequence.features is not None and result.features is not None:
        sequence.features.take(at, result.features)
    sequence.cache.commit(tuple(range(rows)))
    _take(sequence, result, at)


def _take(sequence: TokenSequence, newest: Pass, at: int) -> None:
    """The pass over a part of the prompt that begins at a position is the newest one."""
    if sequence.newest is not None and at > len(sequence.tokens) - 1 - OBSERVED:
        newest = _joined(sequence.newest, newest)  # a partial cache is chosen by all of the last rows
    sequence.newest, sequence.newest_row = newest, len(newest.hidden) - 1


def _joined(before: Pass, last: Pass) -> Pass:
    """The last rows of two parts of a prompt, as those of one."""
    pairs = zip(before.queries, last.queries, strict=True)
    queries = [torch.cat(layers, dim=1)[:, -OBSERVED:] for layers in pairs]
    return Pass(torch.cat([before.hidden, last.hidden])[-OBSERVED:], queries)


def _further(report: OnProgress, at: int, known: int, stage: str, done: int, total: int) -> None:
    """Progress of a part, as that of the whole."""
    report(stage, at + done, known)


@dataclass(slots=True)
class PrefillChunk:
    """A part of a prompt that is read in the pass of other texts' step: its rows cost what rows cost there,
    without a pass of their own.

    Attributes:
        sequence: whose prompt it is.
        rows: of the part, at least one.
        meter: of its text.
        error: what went wrong; the others' step goes on.
    """

    sequence: TokenSequence
    rows: int
    meter: Meter
    error: Exception | None = None

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.sequence.tokens) - 1 - self.sequence.cache.length

    def segment(self) -> Segment:
        """The part's rows, as a chain."""
        tokens, at = self.sequence.tokens, self.sequence.cache.length
        rows = torch.tensor(tokens[at : at + self.rows])
        return Segment(rows, torch.arange(at, at + self.rows), self.sequence.cache)

    def take(self, result: Pass) -> None:
        """Commit the part, once its pass has succeeded for all; what fails here is the part's own."""
        try:
            with self.meter.phase(PREFILL):
                _commit(self.sequence, result, self.rows)
        except Exception as error:
            self.error = error


@dataclass(slots=True)
class RunningSequence:
    """A text under way, as the loop sees it.

    Attributes:
        sequence: its state, after the prompt's prefill.
        strategy: what drafts.
        sampler: the choice rule.
        room: new tokens that may still come.
        eos: token ids that end the text (the token itself is part of the output); may be empty.
        meter: collects counts and the seconds of each phase.
        ended: whether one of ``eos`` came.
        rows: of its newest pass.
        tokens, ms: running means of a step: new tokens, and milliseconds outside of the pass.
        logprobs: how many of the likeliest tokens steps tell with each new token's log-probability; None:
            neither is told.
        raw: whether these are of the model's own distribution.
    """

    sequence: TokenSequence
    strategy: Strategy
    sampler: Sampler
    room: int
    eos: Collection[int]
    meter: Meter
    ended: bool = False
    rows: int = 1
    tokens: float = 1.0
    ms: float = 0.0
    logprobs: int | None = None
    raw: bool = False

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
    :class:`RunningSequence`."""
    text = RunningSequence(sequence, strategy, sampler, max_new_tokens, eos, meter)
    text.begin()
    while not text.is_done:
        made = advance([text])[0]
        if isinstance(made, Exception):
            raise made
        yield made


@torch.inference_mode()
def advance(texts: Sequence[RunningSequence], reading: PrefillChunk | None = None) -> list[Step | Exception]:
    """One step of each text, none of them done, with one verify pass for all; where a text fails, its
    exception. A part of another text's prompt may be read in the same pass, where its rows keep their
    bits beside others (`BaseTarget.prefill_keeps_bits`).

    A step's times are those of its own sequence; the verify pass counts in full for every sequence in it.
    """
    made: list[Step | Exception | None] = [None] * len(texts)
    trees: dict[int, DraftTree] = {}
    alone, rows = len(texts) == 1 and reading is None, sum(text.rows for text in texts)
    context = sum(text.sequence.cache.length for text in texts)
    if reading is not None:
        rows += reading.rows
        context += reading.sequence.cache.length
    tokens, ms = sum(text.tokens for text in texts), sum(text.ms for text in texts)
    for i, text in enumerate(texts):
        rows -= text.rows  # those before it have drafted, the others' are those of their last steps
        rest = (rows, context - text.sequence.cache.length, tokens - text.tokens, ms - text.ms)
        try:
            text.sequence.load, text.sequence.left = ALONE if alone else BatchLoad(*rest), text.room
            text.sequence.begun = perf_counter()
            with text.meter.phase("draft"):
                trees[i] = text.strategy.draft(text.sequence)
            text.rows = len(trees[i])
        except Exception as error:
            made[i] = error
        rows += text.rows
    drafted = [texts[i] for i in trees], list(trees.values())
    for i, verified in zip(trees, _verified(*drafted, reading), strict=True):
        try:
            if isinstance(verified, Exception):
                raise verified
            made[i] = _finished(texts[i], trees[i], *verified)
        except Exception as error:
            made[i] = error
    return [one for one in made if one is not None]


def _verified(
    texts: Sequence[RunningSequence], trees: Sequence[DraftTree], reading: PrefillChunk | None
) -> list[tuple[Pass, Tensor] | Exception]:
    """The pass over the nodes of each tree, and their logits (n, V)."""
    together = len(texts) + (reading is not None)
    if together > 1 and (reading.sequence if reading else texts[0].sequence).model.equal_bits:
        try:
            shared, part = _pass(texts, trees, reading)
        except Exception as error:  # one of them is to blame, and is found by passes of their own
            logger.warning("a pass of %d sequences failed (%s); each is retried alone", together, error)
        else:
            if reading is not None:
                reading.take(part)
            return [*shared]
    made: list[tuple[Pass, Tensor] | Exception] = []
    for text, tree in zip(texts, trees, strict=True):
        try:
            made += _pass([text], [tree])[0]
        except Exception as error:
            made.append(error)
    if reading is not None:
        try:
            part = _pass([], [], reading)[1]
        except Exception as error:
            reading.error = error
        else:
            reading.take(part)
    return made


def _pass(
    texts: Sequence[RunningSequence],
    trees: Sequence[DraftTree],
    reading: PrefillChunk | None = None,
) -> tuple[list[tuple[Pass, Tensor]], Pass]:
    """One pass for all of the texts, with their logits, and for a part of another one's prompt, whose is the
    last pass returned. Nothing is committed."""
    model = (reading or texts[0]).sequence.model
    segments: list[Segment] = []
    with ExitStack() as phases:
        for text, tree in zip(texts, trees, strict=True):
            phases.enter_context(text.meter.phase("verify"))
            sequence = text.sequence
            root_position = len(sequence.tokens) - 1
            tokens, positions = torch.tensor(tree.tokens), torch.tensor(tree.depths) + root_position
            segments.append(Segment(tokens, positions, sequence.cache, tree.parents))
        if reading is not None:
            phases.enter_context(reading.meter.phase(PREFILL))
            segments.append(reading.segment())
        if len(segments) == 1:
            one = segments[0]
            passes = [model.forward(one.tokens, one.positions, one.cache, one.parents)]
        else:
            passes = model.forward_all(segments)
        last = passes[-1]
        if reading is not None:
            passes.pop()
        if not passes:
            return [], last
        hidden = [each.hidden for each in passes]
        logits = model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
    if len(trees) == 1:
        return [(passes[0], logits)], last
    return list(zip(passes, logits.split([len(tree) for tree in trees]), strict=True)), last


def _finished(text: RunningSequence, tree: DraftTree, result: Pass, logits: Tensor) -> Step:
    """Choose, commit and observe."""
    sequence, strategy, sampler, meter = text.sequence, text.strategy, text.sampler, text.meter
    with meter.phase("choose"):
        if strategy.acceptance == "published":
            accepted = accept_published(tree, logits, sequence.tokens, sampler)
        else:
            accepted = accept_exact(tree, logits, sequence.tokens, sampler, all_rows=not sampler.walks)
        new, text.ended = _new_tokens(tree, accepted, text.room, text.eos)
        kept = accepted.nodes[: len(new)]  # the last new token is the next root, not cached yet
        logprobs = ()
        if text.logprobs is not None:
            paths = [new[:depth] for depth in range(len(new))]
            rows = (logits[[*kept]], sequence.tokens, paths, new)
            logprobs = sampler.logprobs(*rows, text.logprobs, text.raw)
    with meter.phase("commit"):
        if sequence.features is not None and result.features is not None:
            features = result.features.index_select(1, to_device(kept, result.features.device))
            sequence.features.take(sequence.cache.length, features)
        sequence.cache.commit(kept)
        sequence.tokens.extend(new)
        sequence.newest, sequence.newest_row = result, kept[-1]
        text.room -= len(new)
    taken = accepted.nodes[1 : len(new) + 1]
    step = Step(
        token_ids=tuple(new),
        drafted=len(tree) - 1,
        accepted=len(taken),
        ngram_accepted=sum(tree.sources[node] == "ngram" for node in taken),
        gamma=tree.gamma,
        sources=(*(tree.sources[node] for node in taken), "target")[: len(new)],
        logprobs=logprobs,
        times=(times := meter.lap()),
    )
    with meter.phase("observe"):
        strategy.observe(sequence, step, kept)
    meter.add(step)
    times |= meter.lap()
    text.tokens += _SLOW * (len(new) - text.tokens)
    text.ms += _SLOW * (1000 * (step.seconds - times.get("verify", 0.0)) - text.ms)
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
