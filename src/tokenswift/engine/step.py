"""The decode loop (paper, Algorithm 1): draft, verify, choose, commit, observe.

Every strategy runs through this loop, plain decoding too (its tree is the bare root). What comes out
is decided by the target model and the acceptance rule alone; a strategy decides only how fast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from tokenswift.interfaces import Sequence, Strategy
from tokenswift.metrics import PREFILL, Meter
from tokenswift.sampling.accept import accept_exact, accept_published
from tokenswift.sampling.choice import Sampler
from tokenswift.types import Accepted, DraftTree, OnProgress, Step


def prefill(sequence: Sequence, on_progress: OnProgress | None = None) -> None:
    """Run the prompt, all but its last token (the first root), into the full cache.

    ``on_progress`` is told of the stage "prompt", in tokens.
    """
    known = sequence.tokens[:-1]
    if known:
        newest = sequence.model.prefill(known, sequence.cache, on_progress)
        sequence.newest, sequence.newest_row = newest, len(newest.hidden) - 1


def decode(
    sequence: Sequence,
    strategy: Strategy,
    sampler: Sampler,
    max_new_tokens: int,
    eos: Collection[int],
    meter: Meter,
) -> Iterator[Step]:
    """Generate up to ``max_new_tokens`` tokens after a prefilled sequence, one verify pass a step.

    Args:
        eos: token ids that end the text (the token itself is part of the output); may be empty.
        meter: collects counts and the seconds of each phase.
    """
    model, cache = sequence.model, sequence.cache
    with meter.phase(PREFILL):  # a strategy's own reading of the prompt
        strategy.begin(sequence)
    meter.lap()
    produced = 0
    ended = False
    while produced < max_new_tokens and not ended:
        with meter.phase("draft"):
            tree = strategy.draft(sequence)
        with meter.phase("verify"):
            root_position = len(sequence.tokens) - 1
            tokens = torch.tensor(tree.tokens, device=model.device)
            positions = torch.tensor(tree.depths, device=model.device) + root_position
            result = model.forward(tokens, positions, cache, tree.parents)
            logits = model.logits(result.hidden)
        with meter.phase("choose"):
            if strategy.acceptance == "published":
                accepted = accept_published(tree, logits, sequence.tokens, sampler)
            else:
                on_gpu = model.device.type == "cuda"
                accepted = accept_exact(tree, logits, sequence.tokens, sampler, all_rows=on_gpu)
        with meter.phase("commit"):
            new, ended = _new_tokens(tree, accepted, max_new_tokens - produced, eos)
            nodes = accepted.nodes[: len(new)]  # the last new token is the next root, not cached yet
            cache.commit(nodes)
            sequence.tokens.extend(new)
            sequence.newest, sequence.newest_row = result, nodes[-1]
        produced += len(new)
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
        yield step


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
