"""Token recycling: what is kept of passes, and what is drafted from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.speculation.drafters.prices import fix_prices
from tests.speculation.drafters.test_accepted import GREEDY, NOISY, PROMPT, llm_of, prompt
from tokenswift import SamplingParams
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation import methods
from tokenswift.speculation.drafters import recycle
from tokenswift.speculation.drafters.base import Candidates
from tokenswift.speculation.drafters.lookup import PromptLookup
from tokenswift.speculation.drafters.recycle import RANKED, Rankings, Recycle


def test_rankings_are_found_by_the_longest_end() -> None:
    table = Rankings()
    values = [4.0, 3.0, 2.0, 1.0]
    older = [9, 8, 7, 6]
    newer = [10, 11, 12, 13]
    table.put([1, 2, 3, 4], older, values)
    table.put([5, 3, 4], newer, values)
    assert table.get([0, 2, 3, 4]) == (3, older, values)
    assert table.get([7, 3, 4]) == (2, newer, values)
    assert table.get([4]) == (1, newer, values)
    assert table.get([3]) is None
    assert table.get([]) is None


def test_a_table_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycle, "SLOTS", 64)
    table = Rankings()
    for token in range(1000):
        table.put([token, token + 1, token + 2], [token] * RANKED, [0.0] * RANKED)
        assert table.get([token, token + 1, token + 2]) == (3, [token] * RANKED, [0.0] * RANKED)
    assert len(table._slots) == 64


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
def test_earlier_rankings_are_accepted(monkeypatch: pytest.MonkeyPatch, sampling: str) -> None:
    """With nothing else to draft from, of a text whose next token follows from the last two."""
    fix_prices(monkeypatch, 0.01)
    monkeypatch.setattr(PromptLookup, "propose", lambda *args: None)
    params = GREEDY if sampling == "greedy" else NOISY
    llm = llm_of(None, sampling == "greedy")
    steps = list(
        llm.stream(prompt(PROMPT), 400, strategy_options={"draft": "hidden"}, sampling=params)
    )
    late = [step for step in steps[len(steps) // 2 :] if step.drafted][:-1]
    assert {source for step in late for source in step.sources} == {"recycle", "target"}
    assert sum(step.accepted for step in late) > 3 * len(late)
    plain = llm.generate(prompt(PROMPT), 400, "autoregressive", sampling=params)
    assert [token for step in steps for token in step.token_ids] == plain.token_ids


@pytest.mark.parametrize(("multiplier", "likeliest"), [(0.0, 15), (0.8, 40)])
def test_candidates_are_ranked_under_dry(multiplier: float, likeliest: int) -> None:
    """A token that DRY penalises is not the likeliest candidate."""
    params = SamplingParams(greedy=True, dry_multiplier=multiplier, dry_breakers=())
    sampler = Sampler(params, 64)
    lookup, drafter = methods.free_drafters(sampler, True, {})
    text: Any = SimpleNamespace(
        tokens=[*range(10, 30), 5, *range(10, 15)], eos=set(), raise_if_cancelled=lambda: None
    )
    lookup.begin(text)
    assert isinstance(drafter, Recycle)
    drafter.rankings.put(text.tokens, [15, 40, 41, 42], [9.0, 8.0, 2.0, 1.0])
    candidates = Candidates(text, sampler, True)
    candidates.ask(drafter)
    chances = candidates.tree.chances[1:]
    assert candidates.tree.tokens[1 + chances.index(max(chances))] == likeliest
