"""A position's states and logits have the same bits, however the pass that computes them is made
up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import tokenswift
from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.models.target import Target, backend_for, make_target

PROMPTS = Path(tokenswift.__file__).parent / "data" / "prompts"

pytestmark = pytest.mark.skipif(
    not isinstance(backend_for(), CpuBackend), reason="no compiled kernels: bits are not promised"
)


class Text:
    """A text fed to a target in passes of any make-up; collects the states of its positions."""

    def __init__(self, target: Target, tokens: list[int], vocab: int) -> None:
        self.target = target
        self.tokens = tokens
        self.vocab = vocab
        self.cache = target.new_cache(len(tokens) + 80)
        self.states: dict[int, torch.Tensor] = {}

    def chain(self, rows: int) -> None:
        """The next ``rows`` tokens as a prefill chunk (one row: a step of plain decoding)."""
        start = self.cache.length
        tokens = torch.tensor(self.tokens[start : start + rows])
        hidden = self.target.forward(
            tokens, torch.arange(start, start + len(tokens)), self.cache
        ).hidden
        self.states |= {start + row: hidden[row] for row in range(len(tokens))}
        self.cache.commit(tuple(range(len(tokens))))

    def tree(self, nodes: int, seed: int) -> None:
        """The next tokens on a path of a random tree of ``nodes`` nodes, wrong tokens elsewhere."""
        rng = random.Random(seed)
        start = self.cache.length
        parents = [-1]
        path = [0]
        while len(parents) < nodes:
            right = rng.random() < 0.4 and start + len(path) < len(self.tokens)
            parents.append(
                path[-1] if right else rng.randrange(max(0, len(parents) - 9), len(parents))
            )
            if right:
                path.append(len(parents) - 1)
        depths = [0] * nodes
        tokens = [rng.randrange(self.vocab) for _ in parents]
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
        for depth, node in enumerate(path):
            tokens[node] = self.tokens[start + depth]
        positions = start + torch.tensor(depths)
        hidden = self.target.forward(torch.tensor(tokens), positions, self.cache, parents).hidden
        self.states |= {start + depth: hidden[node] for depth, node in enumerate(path)}
        self.cache.commit(tuple(path))


def mixed(target: Target, tokens: list[int], vocab: int, least: int, seed: int) -> Text:
    """The text from position ``least`` on in passes of random make-up, before it in chunks of
    random size."""
    rng = random.Random(seed)
    text = Text(target, tokens, vocab)
    while (done := text.cache.length) < len(tokens):
        if done < least:
            text.chain(min(rng.choice((1, 7, 64, 300, 512)), least - done))
        elif rng.random() < 0.3:
            text.chain(rng.choice((1, 2, 5, 13, 40)))
        else:
            text.tree(rng.choice((2, 3, 5, 8, 12, 13, 20, 41, 64)), rng.randrange(1 << 30))
    return text


def check(target: Target, tokens: list[int], vocab: int, least: int, seeds: int) -> int:
    """Positions from ``least`` on: alone, and in passes of other make-ups; returns how many were
    compared."""
    alone = Text(target, tokens, vocab)
    alone.chain(least)
    for _ in range(least, len(tokens)):
        alone.chain(1)
    places = range(least, len(tokens))
    expected = torch.stack([alone.states[i] for i in places])
    logits = torch.cat([target.logits(row[None]) for row in expected])
    assert logits.isfinite().all()
    assert torch.equal(target.logits(expected), logits)
    threads = torch.get_num_threads()
    try:
        for seed in range(seeds):
            torch.set_num_threads(1 + seed % 2)
            states = mixed(target, tokens, vocab, least, seed).states
            for i, state in zip(places, expected, strict=True):
                assert torch.equal(states[i], state), (seed, i)
    finally:
        torch.set_num_threads(threads)
    return len(places) * seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, dtype: torch.dtype) -> None:
    target = make_target(tiny_model(family, max_position_embeddings=1024).to(dtype))
    tokens = torch.randint(2, VOCAB, (330,), generator=torch.Generator().manual_seed(6)).tolist()
    check(target, tokens, VOCAB, 240, 4)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_model(embedded: str, dtype: str) -> None:
    llm = LLM(embedded, dtype=dtype, device="cpu", heads="none")
    tokens = llm.encode((PROMPTS / "observatory.txt").read_text(encoding="utf-8"))[:570]
    check(llm.target, tokens, llm.target.vocab_size, 480, 2)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_model_to_12k(embedded: str, dtype: str) -> None:
    llm = LLM(embedded, dtype=dtype, device="cpu", heads="none", rope_scaling="yarn:2")
    words: object = [
        llm.encode(path.read_text(encoding="utf-8")) for path in sorted(PROMPTS.glob("*.txt"))
    ]
    tokens = [token for text in words for token in text] * 4
    compared = sum(
        check(llm.target, tokens[:length], llm.target.vocab_size, length - 250, 2)
        for length in (1000, 4000, 8000, 12000)
    )
    assert compared == 2000
