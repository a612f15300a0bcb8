"""What strategies draft, step after step, against the reference; and what the dynamic cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.spec.drafters import reference
from tests.spec.drafters.plain import Text, run
from tests.tiny import tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.config import OPTIONS
from tokenswift.engine.step import decode, prefill
from tokenswift.kv.sparse import SparseCache
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.spec.methods import STRATEGIES
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import DraftTree, Step

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.3, penalty_window=10)
PAPER = SamplingParams(seed=2, min_p=0.02, temperature=1.3, penalty_window=10)
SAMPLINGS = {"greedy": GREEDY, "paper": PAPER}
BUDGET, SINKS = 14, 3
VOCAB = 12  # so few that many n-grams start with the same token
_MADE = torch.Generator().manual_seed(6)
PROMPT = torch.randint(VOCAB, (60,), generator=_MADE).tolist()
PROMPT += PROMPT[20:40]  # some n-grams twice


def model_of() -> Any:
    return tiny_model("llama", vocab_size=VOCAB)


def heads_of(kind: str, inner: int = 0) -> Heads:
    """Random heads; their drafts hang on everything that they are given."""
    torch.manual_seed(8)
    heads = Heads(HeadsConfig(kind=kind, count=3, hidden_size=48, vocab_size=VOCAB, inner=inner))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval().requires_grad_(False)


class Watched:
    """A strategy; collects its trees, and the text as it was when each was drafted."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.name, self.acceptance = strategy.name, strategy.acceptance
        self.max_nodes = strategy.max_nodes
        self.drafts: list[tuple[list[int], DraftTree]] = []

    def begin(self, sequence: TokenSequence) -> None:
        self.strategy.begin(sequence)

    def draft(self, sequence: TokenSequence) -> DraftTree:
        tree = self.strategy.draft(sequence)
        self.drafts.append((list(sequence.tokens), tree))
        return tree

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        self.strategy.observe(sequence, step, nodes)


def drafts(
    llm: LLM,
    strategy: str,
    options: dict[str, Any],
    params: SamplingParams,
    new: int,
    prompt: Sequence[int] = PROMPT,
) -> list[tuple[list[int], DraftTree]]:
    """The trees of ``new`` tokens, each with the text before it; there is room for more, so none is cut."""
    sampler = Sampler(params, VOCAB)
    made = STRATEGIES[strategy].build(llm.resources, OPTIONS[strategy](**options), sampler)
    watched = Watched(made)
    room = new + watched.max_nodes
    cache = llm.target.new_cache(len(prompt) + room + watched.max_nodes)
    sequence = TokenSequence(list(prompt), len(prompt), cache, llm.target, sampler, watched, room)
    with torch.inference_mode():
        prefill(sequence)
        watched.begin(sequence)
        for _ in decode(sequence):
            if len(sequence.tokens) >= len(prompt) + new:
                break
    return watched.drafts


def check(tree: DraftTree, expected: reference.Tree) -> None:
    """Candidate by candidate."""
    nodes = zip(tree.tokens, tree.parents, tree.depths, tree.sources, strict=True)
    assert list(nodes)[1:] == expected.nodes
    assert tree.tokens[0] == expected.root


def tokenswift_trees(
    llm: LLM, found: list[tuple[list[int], DraftTree]], options: dict[str, Any], params: SamplingParams
) -> None:
    """Compare every tree of a run of tokenswift or medusa with the reference."""
    rule = reference.ChoiceRule(params, VOCAB, options.get("candidates", "coupled") == "coupled")
    heads = reference.HeadStates(llm.resources.heads, llm.model) if llm.resources.heads else None
    text = Text(llm.model)
    cache = options.get("cache")
    held = reference.Held(
        reference.important, BUDGET, SINKS, refresh=cache == "dynamic", frozen=cache == "partial"
    )
    backbone = options.get("draft") == "partial"
    never: list[int] = []
    frequent = llm.resources.frequent()
    if frequent is not None and options.get("vocabulary") != "full":
        never = sorted(set(range(VOCAB)) - {*frequent.tolist(), *found[0][0]})
    grower = reference.Grower(llm.model, heads, rule, options["tree"], never)
    for tokens, tree in found:
        text.extend(tokens[:-1])
        expected = reference.Tree(tokens[-1])
        base, total = text.rows[-1].hidden, len(tokens) - 1
        if backbone:
            seen = text.all(total) if cache == "full" else text.held(held.at(text, total))
            base = run(llm.model, tokens[-1], total, seen).hidden
        depth = 0
        if backbone or heads:
            depth = grower.grow(expected, tokens, base, backbone)
        if options.get("ngrams"):
            prefix = [expected.nodes[0][0]] if backbone else []
            start = prefix[0] if prefix else tokens[-1]
            for gram in reference.branches(
                tokens, start, len(prefix), options["ngrams"], options["ngram_count"], rule
            ):
                node = 0
                for token in [*prefix, *gram]:
                    node = expected.add(node, token, "ngram")
                depth = max(depth, len(prefix) + len(gram))
        check(tree, expected)
        assert tree.gamma == depth


KINDS = {"none": None, "linear": ("linear", 0), "conditioned": ("conditioned", 8), "medusa": ("medusa", 2)}
CASES: list[dict[str, Any]] = [
    {"draft": "hidden", "tree": (1, 3, 3), "ngrams": 2, "ngram_count": 1},
    {"draft": "hidden", "tree": (3, 2), "ngrams": 1, "ngram_count": 2, "candidates": "probability"},
    {"draft": "partial", "cache": "full", "tree": (1, 3, 2, 2), "ngrams": 3, "ngram_count": 1},
    {"draft": "partial", "cache": "dynamic", "tree": (2, 2, 1), "ngrams": 2, "ngram_count": 1},
    {"draft": "partial", "cache": "partial", "tree": (3, 1), "ngrams": 0, "candidates": "probability"},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("kind", KINDS)
def test_tokenswift(kind: str, case: int, sampling: str) -> None:
    known = KINDS[kind]
    llm = LLM.from_model(model_of(), heads=heads_of(*known) if known else None)
    params, options = SAMPLINGS[sampling], CASES[case]
    found = drafts(llm, "tokenswift", {**options, "budget": BUDGET, "sinks": SINKS}, params, 20)
    tokenswift_trees(llm, found, options, params)
    if options["ngrams"]:
        assert any("ngram" in tree.sources for _, tree in found)


@pytest.mark.parametrize("vocabulary", ["frequent", "full"])
@pytest.mark.parametrize("kind", ["linear", "conditioned"])
def test_heads_draft_frequent_tokens_and_the_prompts(kind: str, vocabulary: str) -> None:
    llm = LLM.from_model(model_of(), heads=heads_of(kind))
    assert llm.resources.heads is not None
    llm.resources.heads.frequent = torch.tensor([1, 2, 5, 7])
    options = {"draft": "partial", "cache": "full", "tree": (2, 2, 2), "ngrams": 0, "vocabulary": vocabulary}
    found = drafts(llm, "tokenswift", options, PAPER, 12, (2, 3, 9, 3))
    tokenswift_trees(llm, found, options, PAPER)
    drafted = {tree.tokens[node] for _, tree in found for node in range(len(tree)) if tree.depths[node] > 1}
    assert (drafted <= {1, 2, 3, 5, 7, 9}) == (vocabulary == "frequent")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("candidates", ["coupled", "probability"])
def test_medusa(candidates: str, sampling: str) -> None:
    llm = LLM.from_model(model_of(), heads=heads_of("medusa", 2))
    params, options = SAMPLINGS[sampling], {"tree": (3, 2, 2), "candidates": candidates}
    tokenswift_trees(llm, drafts(llm, "medusa", options, params, 12), options, params)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kv", ["streaming", "snapkv"])
def test_magicdec(kv: str, sampling: str) -> None:
    """Chains of the target itself; the sparse cache has turned over several times by the end."""
    llm, params = LLM.from_model(model_of()), SAMPLINGS[sampling]
    options = {"gamma": 3, "kv": kv, "budget": BUDGET, "sinks": SINKS}
    policy = {"streaming": reference.recent, "snapkv": reference.snapkv}[kv]
    text, rule = Text(llm.model), reference.ChoiceRule(params, VOCAB, coupled=True)
    held = reference.Held(policy, BUDGET, SINKS, refresh=kv == "streaming")
    for tokens, tree in drafts(llm, "magicdec", options, params, 30):
        text.extend(tokens[:-1])
        seen = text.held(held.at(text, len(tokens) - 1))
        expected = reference.Tree(tokens[-1])
        node = 0
        for token in reference.chain(text, tokens, len(tokens) - 1, seen, 3, rule):
            node = expected.add(node, token, "chain")
        check(tree, expected)


@pytest.mark.parametrize("tree", [(1,), (1, 2, 1)], ids=str)
def test_what_the_dynamic_cache_holds(tree: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """At every draft pass of a run: the positions of a selection from scratch, and their keys and values."""
    model = model_of()
    llm = LLM.from_model(model, heads=heads_of("conditioned"))
    held: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    forward = llm.target.forward

    def watched(tokens: Any, positions: Any, cache: Any, *rest: Any) -> Any:
        if isinstance(cache, SparseCache):
            entries = cache.data[:, :, : cache.length].clone()
            held.append((int(positions[0]), cache.positions[:, :, : cache.length].clone(), entries))
        return forward(tokens, positions, cache, *rest)

    monkeypatch.setattr(llm.target, "forward", watched)
    options = {"draft": "partial", "tree": tree, "ngrams": 2, "budget": BUDGET, "sinks": SINKS}
    found = drafts(llm, "tokenswift", options, PAPER, 60)
    assert [position for position, _, _ in held] == [len(tokens) - 1 for tokens, _ in found]
    text = Text(model)
    expected = reference.Held(reference.important, BUDGET, SINKS, refresh=True)
    selections = set()
    for (total, positions, entries), (tokens, _) in zip(held, found, strict=True):
        text.extend(tokens[:-1])
        places = expected.at(text, total)
        selections.add(expected.selected)
        for layer, by_head in enumerate(places):
            for head, own in enumerate(by_head):
                order = positions[layer, head].argsort()
                assert positions[layer, head][order].tolist() == own
                for part, kind in ((2 * layer, "keys"), (2 * layer + 1, "values")):
                    rows = torch.stack([getattr(text.rows[t], kind)[layer][head] for t in own])
                    torch.testing.assert_close(entries[part, head][order], rows, rtol=1e-4, atol=1e-4)
    assert len(selections) > 4, "the cache was hardly ever selected anew"
