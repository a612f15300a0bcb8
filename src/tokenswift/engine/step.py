"""The decode loop (paper, Algorithm 1): propose, forward, accept, commit, observe; and the prefill
before it.

Every strategy uses this loop, and so does plain decoding, whose tree is the root alone. The target
model and the acceptance rule alone decide the tokens; a strategy decides only the speed. A step
advances several sequences by one verify pass over all their trees. Each sequence gets the tokens
that it would get alone, and an error in one ends only that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenswift.kv.memory import to_device
from tokenswift.kv.passes import Pass, Segment
from tokenswift.kv.sparse import OBSERVED
from tokenswift.speculation.sequence_state import ALONE, BatchLoad, SequenceState
from tokenswift.types import Accepted, DraftTree, Logprob, OnProgress, Step

logger = logging.getLogger("tokenswift")
_NEW_WEIGHT = 1 / 16  # weight of a step in a sequence's running means
_REDECODE_ROWS = 64  # rows of a pass that runs generated tokens again
T = TypeVar("T")


@torch.inference_mode()
def step(sequences: Sequence[SequenceState]) -> list[Step | Exception]:
    """Advance unfinished sequences by one step each, with a single verify pass for all.

    Returns each one's step, or the exception that ends it, in order. The shared verify pass counts
    in full in every step's times.
    """
    trees = _propose(sequences)
    passes = _forward(sequences, trees)
    return [
        found
        if isinstance(found, Exception)
        else _catch(_accept_and_commit, sequence, tree, *found)
        for sequence, tree, found in zip(sequences, trees, passes, strict=True)
    ]


def _catch(function: Callable[..., T], *args: Any) -> T | Exception:
    """Return what the function returns, or the exception that it raises: an error ends one sequence
    alone."""
    try:
        return function(*args)
    except Exception as error:
        return error


# ---- propose -------------------------------------------------------------------------------------


def _propose(sequences: Sequence[SequenceState]) -> list[DraftTree | Exception]:
    """Draft a tree for each sequence, which is told of the load by the others."""
    alone, rows = len(sequences) == 1, sum(one.rows for one in sequences)
    tokens, ms = sum(one.mean_tokens for one in sequences), sum(one.mean_ms for one in sequences)
    trees = []
    for one in sequences:
        rows -= (
            one.rows
        )  # sequences before it count by their new trees, those after it by their last ones
        rest = (rows, tokens - one.mean_tokens, ms - one.mean_ms)
        one.load = ALONE if alone else BatchLoad(*rest)
        trees.append(_catch(_draft, one))
        rows += one.rows
    return trees


def _draft(sequence: SequenceState) -> DraftTree:
    masks = sequence.sampler.masks
    with sequence.meter.phase("draft"):
        if masks is not None and masks.is_slow:
            masks.prepare(sequence.tokens)
        tree = sequence.strategy.draft(sequence)
    sequence.rows = len(tree)
    return tree


# ---- forward -------------------------------------------------------------------------------------


def _forward(
    sequences: Sequence[SequenceState], trees: Sequence[DraftTree | Exception]
) -> list[tuple[Pass, Tensor] | Exception]:
    """Run the target over all trees; returns each one's pass and logits (n, V), or its
    exception."""
    drafted = [
        (s, tree) for s, tree in zip(sequences, trees, strict=True) if isinstance(tree, DraftTree)
    ]
    passes: list[tuple[Pass, Tensor] | Exception] = []
    if len(drafted) > 1 and sequences[0].model.equal_bits:
        try:
            passes += _pass(drafted)
        except Exception as error:  # passes of their own show which one is to blame
            logger.warning(
                "a pass of %d sequences failed (%s); each is retried alone", len(drafted), error
            )
    if not passes:
        passes = [_catch(lambda one: _pass([one])[0], each) for each in drafted]
    found = iter(passes)
    return [tree if isinstance(tree, Exception) else next(found) for tree in trees]


def _pass(drafted: Sequence[tuple[SequenceState, DraftTree]]) -> list[tuple[Pass, Tensor]]:
    """One pass over the nodes of several trees; returns each one's part, and its logits (n, V)."""
    model, segments = drafted[0][0].model, list[Segment]()
    with ExitStack() as phases:
        for sequence, tree in drafted:
            phases.enter_context(sequence.meter.phase("verify"))
            positions = torch.tensor(tree.depths) + (len(sequence.tokens) - 1)
            segments.append(
                Segment(torch.tensor(tree.tokens), positions, sequence.cache, tree.parents)
            )
        passes = model.forward_all(segments)
        hidden = [each.hidden for each in passes]
        rows = model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
    return list(zip(passes, rows.split([len(tree) for _, tree in drafted]), strict=True))


# ---- accept and commit ---------------------------------------------------------------------------


def _accept_and_commit(
    sequence: SequenceState, tree: DraftTree, result: Pass, logits: Tensor
) -> Step:
    """Apply the acceptance rule, commit the accepted path, and let the strategy learn from the
    step."""
    strategy, meter = sequence.strategy, sequence.meter
    with meter.phase("choose"):
        accepted = strategy.rule.accept(tree, logits, sequence.tokens, sequence.sampler)
        new = _new_tokens(tree, accepted, sequence)
        kept = accepted.nodes[: len(new)]  # the last new token, the next root, is not cached yet
        logprobs = _logprobs(sequence, logits, kept, new)
    with meter.phase("commit"):
        _commit(sequence, result, kept)
        sequence.tokens.extend(new)
        result.logits = logits
        sequence.last_pass, sequence.last_row = result, kept[-1]
        if sequence.remaining is not None:
            sequence.remaining -= len(new)
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
    sequence.mean_tokens += _NEW_WEIGHT * (len(new) - sequence.mean_tokens)
    sequence.mean_ms += _NEW_WEIGHT * (
        1000 * (made.seconds - times.get("verify", 0.0)) - sequence.mean_ms
    )
    return made


def _new_tokens(tree: DraftTree, accepted: Accepted, sequence: SequenceState) -> list[int]:
    """The step's new tokens, cut to the number still wanted and after the first end-of-text
    token."""
    new = [tree.tokens[node] for node in accepted.nodes[1:]] + [accepted.token]
    new = new[: sequence.remaining]
    end = next((i for i, token in enumerate(new, 1) if token in sequence.eos), None)
    return new[:end]


def _logprobs(
    sequence: SequenceState, logits: Tensor, kept: tuple[int, ...], new: list[int]
) -> tuple[Logprob, ...]:
    """The log-probabilities of each new token, where the request asks for them."""
    if sequence.top_logprobs is None:
        return ()
    paths = [new[:depth] for depth in range(len(new))]
    rows = (logits[[*kept]], sequence.tokens, paths, new)
    return sequence.sampler.logprobs(*rows, sequence.top_logprobs)


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
    start, total, model = sequence.cache.length, len(sequence.tokens) - 1, sequence.model
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
        is_last, features = end > prefill_end - OBSERVED, sequence.features
        result = model.prefill(
            sequence.tokens[start:end], sequence.cache, report, is_last, features
        )
        _set_last_pass(sequence, result, start)
        if rows is not None:
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
    positions, parents = torch.arange(start, start + len(rows)), list(range(-1, len(rows) - 1))
    result = sequence.model.forward(rows, positions, sequence.cache, parents)
    _commit(sequence, result, tuple(range(len(rows))))
    _set_last_pass(sequence, result, start)


def _set_last_pass(sequence: SequenceState, result: Pass, start: int) -> None:
    """Remember a prefill pass as the last one. Near the end, rows of the pass before it are put in
    front: the queries of the last `sparse.OBSERVED` tokens select the partial cache."""
    before = sequence.last_pass
    if before is not None and start > len(sequence.tokens) - 1 - OBSERVED:
        pairs = zip(before.queries, result.queries, strict=True)
        queries = [torch.cat(layers, dim=1)[:, -OBSERVED:] for layers in pairs]
        result = Pass(torch.cat([before.hidden, result.hidden])[-OBSERVED:], queries)
    sequence.last_pass, sequence.last_row = result, len(result.hidden) - 1
