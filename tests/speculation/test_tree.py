"""The draft trie: order, sharing, mask, widths, and the selection of its best part."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenswift.config.strategies import TokenSwiftOptions
from tokenswift.tree import CandidateTree, ancestor_mask, check_tree, children
from tokenswift.types import DraftTree, InputError

TOKENS = st.integers(0, 4)
PATHS = st.lists(st.tuples(st.lists(TOKENS, max_size=5), st.booleans()), max_size=12)


def build(paths: list[tuple[list[int], bool]]) -> DraftTree:
    builder = CandidateTree(9)
    for tokens, ngram in paths:
        builder.add_path(tokens, "ngram" if ngram else "head")
    return builder.build()


def prefixes_of(paths: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:n]) for tokens in paths for n in range(1, len(tokens) + 1)}


@given(PATHS)
@settings(max_examples=200, deadline=None)
def test_trie_holds_exactly_the_prefixes(paths: list[tuple[list[int], bool]]) -> None:
    tree = build(paths)
    assert tree.tokens[0] == 9
    assert tree.parents[0] == -1
    assert tree.depths[0] == 0
    assert tree.sources[0] == "target"
    assert len(tree) == len(tree.parents) == len(tree.depths) == len(tree.sources)
    by_heads = prefixes_of([tokens for tokens, ngram in paths if not ngram])
    prefixes = []
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node  # parents first
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1 == len(tree.path(node))
        prefix = tuple(tree.tokens[i] for i in tree.path(node))
        assert (tree.sources[node] == "ngram") == (prefix not in by_heads)
        prefixes.append(prefix)
    assert len(prefixes) == len(set(prefixes))
    assert set(prefixes) == prefixes_of([tokens for tokens, _ in paths])
    edges = {
        (parent, *edge) for parent, below in enumerate(children(tree)) for edge in below.items()
    }
    assert edges == {(tree.parents[node], tree.tokens[node], node) for node in range(1, len(tree))}


@given(PATHS)
@settings(max_examples=100, deadline=None)
def test_mask_is_the_ancestor_closure(paths: list[tuple[list[int], bool]]) -> None:
    tree = build(paths)
    expected = [[j == 0 or j in tree.path(i) for j in range(len(tree))] for i in range(len(tree))]
    assert ancestor_mask(tree.parents).tolist() == expected


def test_what_two_sources_propose_is_likelier() -> None:
    tree = CandidateTree(9)
    node = tree.add(0, 4, "ngram", 0.5)
    assert tree.add(0, 4, "head", 0.6) == node
    assert tree.child(0, 4) == node
    assert tree.child(node, 4) is None
    assert tree.chances[node] == pytest.approx(0.8)
    assert tree.sources[node] == "head"
    assert tree.path_chance(tree.add(node, 4)) == pytest.approx(0.8 * 0.98)


def test_check_tree() -> None:
    check_tree((1, 3, 3, 3), vocab_size=3)
    with pytest.raises(
        InputError, match="tree is '1,4'; valid: widths up to 3, the vocabulary size"
    ):
        check_tree((1, 4), vocab_size=3)
    for widths, hint in (
        ((3,) * 8, "4096"),
        ((1,) * 5000, "4096"),
        ((), "such as"),
        ((1, 0), "such as"),
    ):
        with pytest.raises(InputError, match=hint):
            TokenSwiftOptions(tree=widths)


def _random_tree(rnd: random.Random, nodes: int) -> CandidateTree:
    tree = CandidateTree(0)
    while len(tree) <= nodes:
        tree.add(rnd.randrange(len(tree)), rnd.randrange(30), "head", rnd.random())
    return tree


@pytest.mark.parametrize("seed", range(20))
def test_the_selection_is_the_best_of_all_trees(seed: int) -> None:
    """Against every subset that is closed under parents, for prices that rise ever faster."""
    rnd = random.Random(seed)
    tree = _random_tree(rnd, 9)
    costs = [0.7 + 0.05 * n + 0.01 * n * n for n in range(len(tree) - seed % 4)]
    rate = [0.05, 0.5, 1.0, 3.0, 30.0][seed % 5]
    chosen, expected = tree.select(costs, rate)
    assert expected == pytest.approx(sum(tree.path_chance(node) for node in chosen))
    best = -math.inf
    for size in range(len(costs)):
        for nodes in combinations(range(1, len(tree)), size):
            if all(tree.parents[node] in (0, *nodes) for node in nodes):
                best = max(best, sum(map(tree.path_chance, nodes)) - rate * costs[size])
    assert expected - rate * costs[len(chosen)] == pytest.approx(best)
    tree.add_path([31])
    part = tree.build(chosen)
    assert part.branches == ()
    assert tree.build().branches == (len(tree) - 1,)
    assert len(part) == len(chosen) + 1
    assert part.gamma == max(part.depths)
    for index, node in enumerate(chosen, 1):
        assert [part.tokens[i] for i in part.path(index)] == tree.path(node)
