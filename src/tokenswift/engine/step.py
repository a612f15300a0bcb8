"""The decode loop (paper, Algorithm 1): propose, forward, accept, commit, observe.

Every strategy runs through this loop, plain decoding too (its tree is the bare root). What comes out
is decided by the target model and the acceptance rule alone; a strategy decides only how fast. A step
advances a list of texts by one verify pass over all their trees; each text is what it would be alone, and
what fails in one of them ends that one alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenswift.kv import OBSERVED, Pass, Segment, to_device
from tokenswift.spec.accept import accept_exact, accept_published
from tokenswift.spec.strategy import ALONE, BatchLoad, TokenSequence
from tokenswift.types import Accepted, DraftTree, Logprob, OnProgress, Step

logger = logging.getLogger("tokenswift")
_SLOW = 1 / 16  # weight of a step in a text's running means
_REDECODED = 64  # rows of a pass that decodes again what a model wrote
T = TypeVar("T")


@torch.inference_mode()
def step(sequences: Sequence[TokenSequence]) -> list[Step | Exception]:
    """One step of each text, none of them done, with one verify pass for all; where a text fails, its
    exception.

    A step's times are those of its own text; the verify pass counts in full for every text in it.
    """
    trees = _propose(sequences)
    passes = _forward(sequences, trees)
    return [
        found if isinstance(found, Exception) else _tried(_accept_and_commit, sequence, tree, *found)
        for sequence, tree, found in zip(sequences, trees, passes, strict=True)
    ]


def _tried(function: Callable[..., T], *args: Any) -> T | Exception:
    """What a function returns, or the exception that it raises: what fails is one text's own."""
    try:
        return function(*args)
    except Exception as error:
        return error


# ---- propose --------------------------------------------------------------------------------------


def _propose(sequences: Sequence[TokenSequence]) -> list[DraftTree | Exception]:
    """The tree of each text, which is told what the step holds besides."""
    alone, rows = len(sequences) == 1, sum(one.rows for one in sequences)
    tokens, ms = sum(one.mean_tokens for one in sequences), sum(one.mean_ms for one in sequences)
    trees = []
    for one in sequences:
        rows -= one.rows  # those before it have drafted, the others' are those of their last steps
        rest = (rows, tokens - one.mean_tokens, ms - one.mean_ms)
        one.load = ALONE if alone else BatchLoad(*rest)
        trees.append(_tried(_draft, one))
        rows += one.rows
    return trees


def _draft(sequence: TokenSequence) -> DraftTree:
    with sequence.meter.phase("draft"):
        tree = sequence.strategy.draft(sequence)
    sequence.rows = len(tree)
    return tree


# ---- forward --------------------------------------------------------------------------------------


def _forward(
    sequences: Sequence[TokenSequence], trees: Sequence[DraftTree | Exception]
) -> list[tuple[Pass, Tensor] | Exception]:
    """The pass over the nodes of each tree, and their logits (n, V); without a tree what kept it away."""
    drafted = [(s, tree) for s, tree in zip(sequences, trees, strict=True) if isinstance(tree, DraftTree)]
    passes: list[tuple[Pass, Tensor] | Exception] = []
    if len(drafted) > 1 and sequences[0].model.equal_bits:
        try:
            passes += _pass(drafted)
        except Exception as error:  # one of them is to blame, and is found by passes of their own
            logger.warning("a pass of %d sequences failed (%s); each is retried alone", len(drafted), error)
    if not passes:
        passes = [_tried(lambda one: _pass([one])[0], each) for each in drafted]
    found = iter(passes)
    return [tree if isinstance(tree, Exception) else next(found) for tree in trees]


def _pass(drafted: Sequence[tuple[TokenSequence, DraftTree]]) -> list[tuple[Pass, Tensor]]:
    """One pass over trees, with their logits."""
    model, segments = drafted[0][0].model, list[Segment]()
    with ExitStack() as phases:
        for sequence, tree in drafted:
            phases.enter_context(sequence.meter.phase("verify"))
            positions = torch.tensor(tree.depths) + (len(sequence.tokens) - 1)
            segments.append(Segment(torch.tensor(tree.tokens), positions, sequence.cache, tree.parents))
        passes = model.forward_all(segments)
        hidden = [each.hidden for each in passes]
        rows = model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
    return list(zip(passes, rows.split([len(tree) for _, tree in drafted]), strict=True))


# ---- accept and commit ----------------------------------------------------------------------------


def _accept_and_commit(sequence: TokenSequence, tree: DraftTree, result: Pass, logits: Tensor) -> Step:
    """Choose, commit and observe."""
    strategy, meter = sequence.strategy, sequence.meter
    with meter.phase("choose"):
        accepted = _accept(sequence, tree, logits)
        new = _new_tokens(tree, accepted, sequence)
        kept = accepted.nodes[: len(new)]  # the last new token is the next root, not cached yet
        logprobs = _logprobs(sequence, logits, kept, new)
    with meter.phase("commit"):
        _commit(sequence, result, kept)
        sequence.tokens.extend(new)
        result.logits = logits
        sequence.newest, sequence.newest_row = result, kept[-1]
        if sequence.left is not None:
            sequence.left -= len(new)
    taken = accepted.nodes[1 : len(new) + 1]
    made = Step(
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
        strategy.observe(sequence, made, kept)
    meter.add(made)
    times |= meter.lap()
    sequence.mean_tokens += _SLOW * (len(new) - sequence.mean_tokens)
    sequence.mean_ms += _SLOW * (1000 * (made.seconds - times.get("verify", 0.0)) - sequence.mean_ms)
    return made


def _accept(sequence: TokenSequence, tree: DraftTree, logits: Tensor) -> Accepted:
    sampler = sequence.sampler
    if sequence.strategy.acceptance == "published":
        return accept_published(tree, logits, sequence.tokens, sampler)
    return accept_exact(tree, logits, sequence.tokens, sampler, all_rows=not sampler.walks)


def _new_tokens(tree: DraftTree, accepted: Accepted, sequence: TokenSequence) -> list[int]:
    """The step's tokens, cut to what may come and after the first EOS."""
    new = [tree.tokens[node] for node in accepted.nodes[1:]] + [accepted.token]
    new = new[: sequence.left]
    end = next((i for i, token in enumerate(new, 1) if token in sequence.eos), None)
    return new[:end]


def _logprobs(
    sequence: TokenSequence, logits: Tensor, kept: tuple[int, ...], new: list[int]
) -> tuple[Logprob, ...]:
    """Of each new token, where they are asked for."""
    if sequence.top_logprobs is None:
        return ()
    paths = [new[:depth] for depth in range(len(new))]
    rows = (logits[[*kept]], sequence.tokens, paths, new)
    return sequence.sampler.logprobs(*rows, sequence.top_logprobs)


def _commit(sequence: TokenSequence, result: Pass, nodes: tuple[int, ...]) -> None:
    """Keep these rows of a pass."""
    at = sequence.cache.length
    if sequence.features is not None and result.features is not None:
        rows = to_device(nodes, result.features.device)
        sequence.features.take(at, result.features.index_select(1, rows))
    sequence.cache.commit(nodes)


# ---- the prompt -----------------------------------------------------------------------------------


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
    end = border = min(known, sequence.prompt_tokens - 1) if redecodes else known
    if rows is not None and model.prefill_keeps_bits:
        end = min(border, at + rows)
    elif rows is not None and border - at > model.prefill_chunk + OBSERVED:
        end = at + model.prefill_chunk

    def report(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(stage, at + done, known)

    if end > at:
        ends, features = end > border - OBSERVED, sequence.features
        newest = model.prefill(sequence.tokens[at:end], sequence.cache, report, ends, features)
        _set_newest(sequence, newest, at)
        if rows is not None:
            return known - end
    while sequence.cache.length < known:
        _decode_again(sequence)
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
    _commit(sequence, result, tuple(range(len(rows))))
    _set_newest(sequence, result, at)


def _set_newest(sequence: TokenSequence, newest: Pass, at: int) -> None:
    """Remember a pass over a part of the prompt as the newest, with the last rows of the one before it: by
    all of them a partial cache is chosen."""
    before = sequence.newest
    if before is not None and at > len(sequence.tokens) - 1 - OBSERVED:
        pairs = zip(before.queries, newest.queries, strict=True)
        queries = [torch.cat(layers, dim=1)[:, -OBSERVED:] for layers in pairs]
        newest = Pass(torch.cat([before.hidden, newest.hidden])[-OBSERVED:], queries)
    sequence.newest, sequence.newest_row = newest, len(newest.hidden) - 1
