"""Adaptive drafting: it never changes the text, takes what pays, leaves what does not, and drafts
right."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from tests.speculation.drafters.prices import always, fix_prices
from tests.speculation.drafters.scripted import scripted_model
from tests.speculation.drafters.test_accepted import GREEDY, NOISY, PROMPT, llm_of, prompt
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.speculation.control import Control
from tokenswift.speculation.drafters.draft_model import MODEL
from tokenswift.speculation.drafters.heads import HIDDEN
from tokenswift.speculation.drafters.partial import PARTIAL
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.modes import PLAIN
from tokenswift.speculation.sequence_state import BatchLoad


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_prices(monkeypatch)


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
@pytest.mark.parametrize(
    ("kind", "mode"), [*product(("conditioned", "linear"), (HIDDEN, PARTIAL)), (None, PARTIAL)]
)
def test_exact_drafts_are_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, kind: str | None, mode: str, sampling: str
) -> None:
    """Heads on the verified state; a chain of passes over the partial cache, and the heads after
    it."""
    monkeypatch.setattr(Control, "choose_mode", always(mode))
    params = GREEDY if sampling == "greedy" else NOISY
    llm = llm_of(kind, sampling == "greedy")
    options: dict[str, object] = {"ngrams": 0}
    options |= {"draft": "hidden"} if mode == HIDDEN else {"budget": 12, "sinks": 2}
    steps = list(llm.stream(prompt(PROMPT), 300, strategy_options=options, sampling=params))
    late = [step for step in steps[len(steps) // 2 :] if step.drafted][:-1]
    assert sum(step.accepted == step.gamma for step in late) >= len(late) - 2
    assert sum(step.accepted for step in late) > (3 if mode == HIDDEN else 4) * len(late)
    if mode == HIDDEN:
        assert {source for step in steps for source in step.sources} == {"head", "target"}


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
def test_a_draft_models_chain_is_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, sampling: str
) -> None:
    """Also where it takes its place again after steps (a few, then hundreds) that others
    drafted."""
    greedy = sampling == "greedy"
    monkeypatch.setattr(Control, "choose_mode", _in_turn)
    llm = llm_of("conditioned", greedy)
    params = GREEDY if greedy else NOISY
    options = {"ngrams": 0, "draft_model": scripted_model(greedy)}
    steps = list(llm.stream(prompt(PROMPT), 900, strategy_options=options, sampling=params))
    drafted = [step for step in steps if "chain" in step.sources]
    late = drafted[len(drafted) // 3 :][:-1]
    assert len(late) > 40
    assert sum(step.accepted == step.gamma for step in late) >= len(late) - 3
    assert sum(step.accepted for step in late) > 3 * len(late)
    plain = llm.generate(prompt(PROMPT), 900, "autoregressive", sampling=params)
    assert [token for step in steps for token in step.token_ids] == plain.token_ids


def _in_turn(self: Control, context: int, load: BatchLoad) -> str:
    """The draft model in three steps of four, then seldom, then again."""
    begun = context - PROMPT
    drafts = self._step % 4 if begun < 200 or begun > 400 else self._step % 40 == 0
    return always(MODEL if drafts else PLAIN)(self, context, load)


@pytest.mark.parametrize("pause", [0, 5])
def test_matches_of_the_text_are_accepted(
    free: None, monkeypatch: pytest.MonkeyPatch, pause: int
) -> None:
    """Also of what was written in steps that asked nobody."""
    monkeypatch.setattr(Control, "pause", lambda control: pause)
    llm = llm_of(None, True)
    stream = llm.stream(prompt(PROMPT), 300, strategy_options={"draft": "hidden"}, sampling=GREEDY)
    steps = list(stream)
    assert stream.result.drafting is not None
    assert "gain" in stream.result.drafting
    late = [step for step in steps[len(steps) // 2 :] if step.drafted]
    assert {source for step in late for source in step.sources} <= {"ngram", "recycle", "target"}
    assert sum(step.accepted for step in late) > 8 * len(late)
    drafted = sum(step.drafted > 0 for step in steps)
    if pause:
        assert len(steps) - drafted >= pause * (drafted - 1)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=4), SamplingParams(greedy=True, repetition_penalty=1.0)]
)
@pytest.mark.parametrize("count,guest", [(0, False), (3, False), (3, True)])
def test_the_text_is_plain_decodings_whatever_is_decided(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, count: int, guest: bool
) -> None:
    """Modes, prices and trees at random: no token changes."""
    rnd = random.Random(count)

    def mode(self: Control, context: int, load: BatchLoad) -> str:
        name = rnd.choice(
            [n for n in self.modes if n == PLAIN or context >= self.estimates[n].min_cached]
        )
        return always(name, rnd.choice([0.0, 0.1, 1.0, 10.0]))(self, context, load)

    heads = Heads(HeadsConfig("conditioned", count, 48, VOCAB, inner=8)) if count else None
    llm = LLM.from_model(tiny_model("llama"), heads=heads)
    text = [rnd.randrange(VOCAB) for _ in range(40)]
    plain = llm.generate(text, 150, "autoregressive", sampling=sampling, ignore_eos=True)
    fix_prices(monkeypatch)
    monkeypatch.setattr(Control, "choose_mode", mode)
    chances = list[float]()

    def deciding(answer: bool) -> Callable[[Control, str, float, int, float], bool]:
        def should_ask(self: Control, name: str, expected: float, rows: int, chance: float) -> bool:
            chances.append(chance)
            return answer

        return should_ask

    for answer in (True, True, False):
        monkeypatch.setattr(Control, "should_ask", deciding(answer))
        options: dict[str, object] = {"budget": 32, "sinks": 4}
        options |= {"draft_model": tiny_model("llama", layers=1)} if guest else {}
        auto = llm.generate(text, 150, strategy_options=options, sampling=sampling, ignore_eos=True)
        assert auto.token_ids == plain.token_ids
        assert auto.drafting is not None
        assert len(auto.drafting["modes"]) == 2 + bool(count) + guest
    assert 0.4 < max(chances) < 1.5
    assert auto.token_sources["head"] == 0
    assert auto.token_sources["chain"] == 0
