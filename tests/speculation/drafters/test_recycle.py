"""Token recycling: what is kept of passes, and what is drafted from it."""

from __future__ import annotations

import pytest

from tests.speculation.drafters.prices import fix_prices
from tests.speculation.drafters.test_accepted import GREEDY, NOISY, PROMPT, llm_of, prompt
from tokenswift.speculation.drafters import recycle
from tokenswift.speculation.drafters.lookup import PromptLookup
from tokenswift.speculation.drafters.recycle import RANKED, Rankings


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
