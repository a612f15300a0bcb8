"""The decode loop (paper, Algorithm 1): propose, forward, accept, commit, observe; and the prefill
before it.

A step drafts a tree: its root is the text's last token, which no pass has run yet, and below it are
tokens that may come next. One *verify pass* of the target model runs all nodes of the tree, a row
for each. The acceptance rule then follows the tree from the root for as long as the chosen token is
a drafted one, and the token chosen last, which has no node, becomes the next root. So a step yields
one token at least.

Every strategy uses this loop, and so does plain decoding, whose tree is the root alone. The target
model and the acceptance rule alone decide the tokens; a strategy decides only the speed. A step
advances several sequences by one verify pass over all their trees. Each sequence gets the tokens
that it would get alone, and an error in one ends only that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kv.memory import to_device
from tokenswift.kv.passes import Pass, Segment
from tokenswift.kv.sparse import OBSERVED
from tokenswift.speculation.sequence_state import ALONE, BatchLoad, SequenceState
from tokenswift.types import Accepted, DraftTree, Logprob, OnProgress, Step

logger = logging.getLogger("tokenswift")
_NEW_WEIGHT = 1 / 16  # weight of the newest step in a sequence's running means
_REDECODE_ROWS = 64  # tokens of a resumed text that one decode pass runs again
T = TypeVar("T")


@torch.inference_mode()
def step(sequences: Sequence[SequenceState]) -> list[Step | Exception]:
    """Advance unfinished sequences by one step each, with a single verify pass for all.

    Returns each one's step, or the exception that ends it, in order. The shared verify pass counts
    in full in every step's times.
    """
    trees = _propose(sequences)
    passes = _forward(sequences, trees)
    steps: list[Step | Exception] = []
    for sequence, verified in zip(sequences, passes, strict=True):
        if isinstance(verified, Exception):
            steps.append(verified)
        else:
            steps.append(_catch(partial(_accept_and_commit, sequence, verified)))
    return steps


@dataclass(slots=True)
class Verified:
    """A drafted tree that the target has run.

    Attributes:
        tree: the tree, n nodes.
        result: its part of the verify pass.
        logits: of each node, (n, V) float32.
    """

    tree: DraftTree
    result: Pass
    logits: Float[Tensor, "n V"]


def _catch(function: Callable[[], T]) -> T | Exception:
    """Return what the function returns, or the exception that it raises: an error ends one sequence
    alone."""
    try:
        return function()
    except Exception as error:
        return error


# ---- propose -------------------------------------------------------------------------------------


def _propose(sequences: Sequence[SequenceState]) -> list[DraftTree | Exception]:
    """Draft a tree for each sequence, which is told what the others add to the pass: more rows
    make each further one cheaper or dearer."""
    rows = sum(sequence.rows for sequence in sequences)
    tokens = sum(sequence.mean_tokens for sequence in sequences)
    ms = sum(sequence.mean_ms for sequence in sequences)
    trees = []
    for sequence in sequences:
        # sequences before this one count by their new trees, those after it by their last ones
        rows -= sequence.rows
        if len(sequences) == 1:
            sequence.load = ALONE
        else:
            sequence.load = BatchLoad(
                rows=rows, tokens=tokens - sequence.mean_tokens, ms=ms - sequence.mean_ms
            )
        trees.append(_catch(partial(_draft, sequence)))
        rows += sequence.rows
    return trees


def _draft(sequence: SequenceState) -> DraftTree:
    """The strategy's tree for one sequence."""
    masks = sequence.sampler.masks
    with sequence.meter.phase("draft"):
        if masks is not None and masks.is_slow:  # which the scheduler has mostly done ahead
            masks.prepare(sequence.tokens)
        tree = sequence.strategy.draft(sequence)
    sequence.rows = len(tree)
    return tree


# ---- forward -------------------------------------------------------------------------------------


def _forward(
    sequences: Sequence[SequenceState], trees: Sequence[DraftTree | Exception]
) -> list[Verified | Exception]:
    """Run the target over all trees; a sequence whose tree is an exception keeps that."""
    drafted = [
        (sequence, tree)
        for sequence, tree in zip(sequences, trees, strict=True)
        if isinstance(tree, DraftTree)
    ]
    passes: list[Verified | Exception] = []
    # together only where a row's bits do not depend on the rows beside it
    if len(drafted) > 1 and sequences[0].model.equal_bits:
        try:
            passes += _pass(drafted)
        except Exception as error:  # passes of their own show which one is to blame
            logger.warning(
                "a pass of %d sequences failed (%s); each is retried alone", len(drafted), error
            )
    if not passes:
        passes = [_catch(partial(_pass_alone, sequence, tree)) for sequence, tree in drafted]
    remaining = iter(passes)
    return [tree if isinstance(tree, Exception) else next(remaining) for tree in trees]


def _pass_alone(sequence: SequenceState, tree: DraftTree) -> Verified:
    """A pass over the nodes of one tree."""
    return _pass([(sequence, tree)])[0]


def _pass(drafted: Sequence[tuple[SequenceState, DraftTree]]) -> list[Verified]:
    """One pass over the nodes of several trees."""
    model = drafted[0][0].model
    segments: list[Segment] = []
    with ExitStack() as phases:
        for sequence, tree in drafted:
            phases.enter_context(sequence.meter.phase("verify"))
            positions = torch.tensor(tree.depths) + (len(sequence.tokens) - 1)
            segments.append(
                Segment(torch.tensor(tree.tokens), positions, sequence.cache, tree.parents)
            )
        passes = model.forward_all(segments)
        hidden = [each.hidden for each in passes]
        logits = model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
    trees = [tree for _, tree in drafted]
    parts = logits.split([len(tree) for tree in trees])
    return [
        Verified(tree, result, rows)
        for tree, result, rows in zip(trees, passes, parts, strict=True)
    ]


# ---- accept and commit ---------------------------------------------------------------------------


def _accept_and_commit(sequence: SequenceState, verified: Verified) -> Step:
    """Apply the acceptance rule, commit the accepted path, and let the strategy learn from the
    step."""
    strategy = sequence.strategy
    meter = sequence.meter
    tree = verified.tree
    logits = verified.logits
    with meter.phase("choose"):
        accepted = strategy.rule.accept(tree, logits, sequence.tokens, sequence.sampler)
        new_tokens = _new_tokens(tree, accepted, sequence)
        # the last new token, the next root, is not cached yet
        path = accepted.nodes[: len(new_tokens)]
        logprobs = _logprobs(sequence, logits, path, new_tokens)
    with meter.phase("commit"):
        _commit(sequence, verified.result, path)
        sequence.tokens.extend(new_tokens)
        verified.result.logits = logits
        sequence.last_pass = verified.result
        sequence.last_row = path[-1]
        if sequence.remaining is not None:
            sequence.remaining -= len(new_tokens)
    accepted_nodes = accepted.nodes[1 : len(new_tokens) + 1]
    sources = [tree.sources[node] for node in accepted_nodes]
    step = Step(
        token_ids=tuple(new_tokens),
        drafted=len(tree) - 1,
        accepted=len(accepted_nodes),
        ngram_accepted=sources.count("ngram"),
        gamma=tree.gamma,
        sources=(*sources, "target")[: len(new_tokens)],  # the last token had no node
        logprobs=logprobs,
        times=meter.lap(),  # seconds of each phase since the last step's
    )
    with meter.phase("observe"):
        strategy.observe(sequence, step, path)
    observing = meter.lap()
    sequence.observe_seconds = observing.get("observe", 0.0)
    step = replace(step, times={**step.times, **observing})
    meter.add(step)
    unshared_ms = 1000 * (step.seconds - step.times.get("verify", 0.0))
    sequence.mean_tokens += _NEW_WEIGHT * (len(new_tokens) - sequence.mean_tokens)
    sequence.mean_ms += _NEW_WEIGHT * (unshared_ms - sequence.mean_ms)
    return step


def _new_tokens(tree: DraftTree, accepted: Accepted, sequence: SequenceState) -> list[int]:
    """The step's new tokens, cut to the number still wanted and after the first end-of-text
    token."""
    new_tokens = [tree.tokens[node] for node in accepted.nodes[1:]] + [accepted.token]
    new_tokens = new_tokens[: sequence.remaining]
    for count, token in enumerate(new_tokens, 1):
        if token in sequence.eos:
            return new_tokens[:count]
    return new_tokens


def _logprobs(
    sequence: SequenceState, logits: Tensor, path: tuple[int, ...], new_tokens: list[int]
) -> tuple[Logprob, ...]:
    """The log-probabilities of each new token, where the request asks for them."""
    if sequence.top_logprobs is None:
        return ()
    contexts = [new_tokens[:depth] for depth in range(len(new_tokens))]
    rows = logits[list(path)]
    return sequence.sampler.logprobs(
        rows, sequence.tokens, contexts, new_tokens, sequence.top_logprobs
    )


def _commit(sequence: SequenceState, result: Pass, nodes: tuple[int, ...]) -> None:
    """Keep the cache entries, and features, of these rows of a pass."""
    start = sequence.cache.length
    if sequence.features is not None and result.features is not None:
        rows = to_device(nodes, result.features.device)
        sequence.features.take(start, result.features.index_select(1, rows))
    sequence.cache.commit(nodes)


# ---- prefill -------------------------------------------------------------------------------------


def prefill(
    sequence: SequenceState, on_progress: OnProgress | None = None, rows: int | None = None
) -> int:
    """Run the tokens that are not cached yet, all but the last one (the first root), into the full
    cache.

    They are the prompt's, and in a resumed run the generated ones. Where prefill and decoding round
    differently, generated tokens are run by decode passes again, for the same bits.

    Args:
        on_progress: called with the stage "prompt", tokens done, and tokens in all.
        rows: tokens to run now, about; None: all. Where bits depend on how a prompt is cut into
            chunks, it is cut as it would be without this limit.
    Returns:
        Tokens still to run.
    """
    model = sequence.model
    start = sequence.cache.length
    total = len(sequence.tokens) - 1
    # a backend whose prefill rounds otherwise than its decode passes, as on a GPU
    redecodes = model.equal_bits and not model.prefill_keeps_bits
    end = prefill_end = min(total, sequence.prompt_tokens - 1) if redecodes else total
    if rows is not None and model.prefill_keeps_bits:
        end = min(prefill_end, start + rows)
    elif rows is not None and prefill_end - start > model.prefill_chunk + OBSERVED:
        end = start + model.prefill_chunk

    def report(stage: str, done: int, _: int) -> None:
        if on_progress is not None:
            on_progress(stage, start + done, total)

    if end > start:
        result = model.prefill(
            sequence.tokens[start:end],
            sequence.cache,
            report,
            is_last=end > prefill_end - OBSERVED,  # whose queries are to be kept
            features=sequence.features,
            on_hidden=sequence.on_hidden,
        )
        _set_last_pass(sequence, result, start)
        if rows is not None:  # that was this call's share
            return total - end
    while sequence.cache.length < total:
        _decode_again(sequence)
        report("prompt", sequence.cache.length - start, total - start)
        if rows is not None:
            break
    return total - sequence.cache.length


def _decode_again(sequence: SequenceState) -> None:
    """Run the next generated tokens as a chain, by a decode pass."""
    start = sequence.cache.length
    rows = torch.tensor(sequence.tokens[start:-1][:_REDECODE_ROWS])
    positions = torch.arange(start, start + len(rows))
    parents = list(range(-1, len(rows) - 1))
    result = sequence.model.forward(rows, positions, sequence.cache, parents)
    _commit(sequence, result, tuple(range(len(rows))))
    _set_last_pass(sequence, result, start)


def _set_last_pass(sequence: SequenceState, result: Pass, start: int) -> None:
    """Remember a prefill pass as the last one. Near the end, rows of the pass before it are put in
    front: the queries of the last `sparse.OBSERVED` tokens select which entries a partial cache,
    for drafting, gets."""
    before = sequence.last_pass
    if before is not None and start > len(sequence.tokens) - 1 - OBSERVED:
        pairs = zip(before.queries, result.queries, strict=True)
        queries = [torch.cat(layers, dim=1)[:, -OBSERVED:] for layers in pairs]
        result = Pass(torch.cat([before.hidden, result.hidden])[-OBSERVED:], queries)
    sequence.last_pass = result
    sequence.last_row = len(result.hidden) - 1
