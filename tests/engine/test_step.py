"""The decode loop over a scripted model: what is accepted, committed, cut and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.engine.step import decode, prefill
from tokenswift.interfaces import KVCache, Pass, Segment
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree, Step

VOCAB = 10
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)


class ListCache(KVCache):
    """A cache of token ids, to see what was committed."""

    data = work = torch.empty(0)
    ordered = True

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.scratch: list[int] = []

    @property
    def length(self) -> int:
        return len(self.kept)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kw: object):
        raise NotImplementedError

    def commit(self, nodes: tuple[int, ...]) -> None:
        self.kept += [self.scratch[node] for node in nodes]


class Counting:
    """A model whose next token is always the last one plus one, modulo the vocabulary."""

    vocab_size = VOCAB
    device = torch.device("cpu")
    equal_bits = prefill_keeps_bits = True

    def __init__(self) -> None:
        self.positions: list[list[int]] = []

    def forward_all(self, segments: list[Segment]) -> list[Pass]:
        return [self.forward(one.tokens, one.positions, one.cache) for one in segments]

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Pass:
        assert isinstance(cache, ListCache)
        cache.scratch = tokens.tolist()
        self.positions.append(positions.tolist())
        return Pass(tokens[:, None].float(), [])

    def prefill(
        self,
        tokens: list[int],
        cache: ListCache,
        on_progress: Any = None,
        ends: bool = True,
        on_read: Any = None,
        features: Any = None,
    ) -> Pass:
        result = self.forward(torch.tensor(tokens), torch.arange(len(tokens)), cache)
        cache.commit(tuple(range(len(tokens))))
        return Pass(result.hidden[-1:], [])

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCAB, VOCAB).float()

    def project(self, normed: Tensor, rows: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Scripted:
    """Drafts the right continuation for as many tokens as the script says, then wrong ones."""

    name = "scripted"
    acceptance = "exact"
    max_nodes = 16

    def __init__(self, *script: int, depth: int = 4) -> None:
        self.script, self.depth = script, depth
        self.steps: list[Step] = []
        self.nodes: list[tuple[int, ...]] = []

    def draft(self, sequence: TokenSequence) -> DraftTree:
        right = self.script[len(self.steps) % len(self.script)]
        root = sequence.tokens[-1]
        builder = CandidateTree(root)
        builder.add(0, (root + 5) % VOCAB)  # a wrong sibling first, so that rows must be compacted
        builder.add_path([(root + 1 + i + (i >= right)) % VOCAB for i in range(self.depth)])
        return builder.build()

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        self.steps.append(step)
        self.nodes.append(nodes)


def run(strategy: Scripted, prompt: list[int], new: int, eos: tuple[int, ...] = ()):
    model, cache = Counting(), ListCache()
    sampler = Sampler(GREEDY, VOCAB)
    sequence = TokenSequence(list(prompt), len(prompt), cache, model, sampler, strategy, new, eos)  # type: ignore[arg-type]
    prefill(sequence)
    steps = list(decode(sequence))
    tokens = [token for step in steps for token in step.token_ids]
    assert sequence.tokens == [*prompt, *tokens]
    assert cache.kept == sequence.tokens[:-1]  # everything but the root is cached, in order
    return tokens, steps, sequence.meter.finish(tokens), model


@pytest.mark.parametrize(
    "script,lengths",
    [((4,), [5, 5, 2]), ((0,), [1] * 12), ((2, 0, 4), [3, 1, 5, 3]), ((1,), [2] * 6)],
)
def test_accepted_lengths_follow_the_script(script: tuple[int, ...], lengths: list[int]) -> None:
    tokens, steps, metrics, model = run(Scripted(*script), [3, 4], 12)
    assert tokens == [(5 + i) % VOCAB for i in range(12)]
    assert [len(step.token_ids) for step in steps] == lengths
    assert metrics.steps == len(lengths)
    assert metrics.mean_acceptance_length == pytest.approx(12 / len(lengths))
    position = 1
    for positions, length in zip(model.positions[1:], lengths, strict=True):
        assert positions == [position, position + 1, *range(position + 1, position + 5)]
        position += length


def test_eos_inside_a_step_ends_the_text_there() -> None:
    tokens, steps, _, _ = run(Scripted(4), [0], 30, eos=(7,))
    assert tokens == [1, 2, 3, 4, 5, 6, 7]
    assert len(steps) == 2 and steps[-1].accepted == 2
