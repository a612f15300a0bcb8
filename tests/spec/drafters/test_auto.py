"""Adaptive drafting: it never changes the text, takes what pays, leaves what does not, and drafts right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.spec.drafters.scripted import scripted_heads, scripted_model
from tests.spec.drafters.test_accepted import GREEDY, NOISY, PROMPT, llm_of, prompt
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, InputError, SamplingParams
from tokenswift.interfaces import ALONE, BatchLoad
from tokenswift.spec.adaptive.controller import PLAIN, Control, Drafted, Gain, _Mode
from tokenswift.spec.adaptive.cost import Costs, Table
from tokenswift.spec.adaptive.estimate import CostEstimate
from tokenswift.spec.drafters.heads import HIDDEN, heads_offer
from tokenswift.spec.drafters.model import MODEL
from tokenswift.spec.drafters.partial import PARTIAL, partial_offer
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.spec.methods.resources import Resources
from tokenswift.tree import CandidateTree

#: rows and levels cost nothing: everything that may be right is drafted
FREE = Table((1, 32), (1.0, 1.000001), (0.0, 0.0), 1e-6, 1e-6)
#: a pass of a row takes 1 + context / 1,000, ten rows twice that; a level a tenth of a pass
REAL = Table((1, 10, 32), (1.0, 2.0, 4.0), (1e-3, 2e-3, 4e-3), 0.1)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resources, "costs", lambda self: FREE)
    monkeypatch.setattr(Costs, "observe", lambda *args: None)
    monkeypatch.setattr(Control, "_price", lambda *args: None)


def test_the_gain_is_measured_against_steps_without_drafts() -> None:
    gain = Gain()
    gain.add(3, 4, {"draft": 1.0, "verify": 4.0, "observe": 1.0})
    gain.add(1, 0, {"draft": 0.5, "verify": 2.5, "choose": 0.5, "observe": 0.25})
    assert gain.ratio is None  # once is no measurement
    gain.add(1, 0, {"verify": 2.0, "choose": 0.5, "commit": 0.5})
    spent = 6 + 3.75 + 3
    assert gain.ratio == pytest.approx(5 * 3 / spent)  # each of the five would have taken 3
    gain.add(2, 2, {"verify": 5.0})
    assert gain.ratio == pytest.approx(7 * 3 / (spent + 5))
    gain.add(1, 0, {"verify": 90.0})  # a hiccup of the machine: time that was spent, no price of a step
    assert gain.ratio == pytest.approx(8 * 3 / (spent + 95))


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
@pytest.mark.parametrize(
    "kind,options", [("conditioned", {"draft": "hidden"}), ("linear", {"draft": "hidden"})]
)
def test_exact_heads_are_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], sampling: str
) -> None:
    monkeypatch.setattr(Control, "mode", _always(HIDDEN))
    params = GREEDY if sampling == "greedy" else NOISY
    llm = llm_of(kind, sampling == "greedy")
    given = {"ngrams": 0, **options}
    steps = list(llm.stream(prompt(PROMPT), 400, strategy_options=given, sampling=params))
    late = [step for step in steps[len(steps) // 2 :] if step.drafted][:-1]
    assert sum(step.accepted == step.gamma for step in late) >= len(late) - 2
    assert sum(step.accepted for step in late) > 3 * len(late)
    assert all(source in ("head", "target") for step in steps for source in step.sources)


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
@pytest.mark.parametrize("kind", ["conditioned", "linear", None])
def test_partial_passes_are_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, kind: str | None, sampling: str
) -> None:
    """A chain of passes over the partial cache, and the heads after it."""
    monkeypatch.setattr(Control, "mode", _always(PARTIAL))
    params = GREEDY if sampling == "greedy" else NOISY
    llm = llm_of(kind, sampling == "greedy")
    given = {"ngrams": 0, "budget": 12, "sinks": 2}
    steps = list(llm.stream(prompt(PROMPT), 300, strategy_options=given, sampling=params))
    late = [step for step in steps[len(steps) // 2 :] if step.drafted][:-1]
    assert sum(step.accepted == step.gamma for step in late) >= len(late) - 2
    assert sum(step.accepted for step in late) > 4 * len(late)


@pytest.mark.parametrize("sampling", ["greedy", "noisy"])
def test_a_draft_models_chain_is_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, sampling: str
) -> None:
    """Also where it takes its place again after steps (a few, then hundreds) that others drafted."""
    greedy = sampling == "greedy"
    monkeypatch.setattr(Control, "mode", _in_turn)
    llm, params = llm_of("conditioned", greedy), GREEDY if greedy else NOISY
    given = {"ngrams": 0, "draft_model": scripted_model(greedy)}
    steps = list(llm.stream(prompt(PROMPT), 900, strategy_options=given, sampling=params))
    drafted = [step for step in steps if "chain" in step.sources]
    late = drafted[len(drafted) // 3 :][:-1]
    assert len(late) > 40
    assert sum(step.accepted == step.gamma for step in late) >= len(late) - 3
    assert sum(step.accepted for step in late) > 3 * len(late)
    plain = llm.generate(prompt(PROMPT), 900, "autoregressive", sampling=params)
    assert [token for step in steps for token in step.token_ids] == plain.token_ids


def _in_turn(self: Control, context: int) -> str:
    """The draft model in three steps of four, then seldom, then again."""
    plain = _always(PLAIN)(self, context)
    begun = context - PROMPT
    drafts = self._step % 4 if begun < 200 or begun > 400 else self._step % 40 == 0
    return _always(MODEL)(self, context) if drafts else plain


@pytest.mark.parametrize(
    ("strategy", "option"),
    [("auto", {"tree": (1,)}), ("auto", {"acceptance": "published"}), ("tokenswift", {"draft_model": "x"})],
)
def test_neither_adaptive_drafting_nor_the_papers_method_becomes_the_other(
    strategy: str, option: dict[str, Any]
) -> None:
    (name,) = option
    with pytest.raises(InputError, match=rf"'{name}' is not an option of strategy {strategy};"):
        llm_of(None, True).generate([1, 2], strategy=strategy, strategy_options=option)


def test_matches_of_the_text_are_accepted(free: None) -> None:
    llm = llm_of(None, True)
    given = {"draft": "hidden"}
    steps = llm.stream(prompt(PROMPT), 300, strategy_options=given, sampling=GREEDY)
    made = list(steps)
    assert steps.result.drafting is not None and "gain" in steps.result.drafting
    late = [step for step in made[len(made) // 2 :] if step.drafted]
    assert {source for step in late for source in step.sources} == {"ngram", "target"}
    assert sum(step.accepted for step in late) > 8 * len(late)


def _always(name: str) -> Any:
    def mode(self: Control, context: int) -> str:
        self._step += 1
        self.reprice(context)
        for known in self.passes.values():
            known.ms = 0.01
        self.current, self.rate = name, 1 / self.costs.verify(1, context)
        return name

    return mode


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=4), SamplingParams(greedy=True, repetition_penalty=1.0)]
)
@pytest.mark.parametrize("count,guest", [(0, False), (3, False), (3, True)])
def test_the_text_is_plain_decodings_whatever_is_decided(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, count: int, guest: bool
) -> None:
    """Modes, prices and trees at random: no token changes."""
    rnd = random.Random(count)

    def mode(self: Control, context: int) -> str:
        self.reprice(context)
        self.rate = rnd.choice([0.0, 0.1, 1.0, 10.0])
        self.current = rnd.choice([name for name in self.modes if self._open(name, context)])
        return self.current

    heads = Heads(HeadsConfig("conditioned", count, 48, VOCAB, inner=8)) if count else None
    llm = LLM.from_model(tiny_model("llama"), heads=heads)
    text = [rnd.randrange(VOCAB) for _ in range(40)]
    plain = llm.generate(text, 150, "autoregressive", sampling=sampling, ignore_eos=True)
    monkeypatch.setattr(Resources, "costs", lambda self: FREE)
    monkeypatch.setattr(Control, "mode", mode)
    for _ in range(3):
        options: dict[str, Any] = {"budget": 32, "sinks": 4}
        options |= {"draft_model": tiny_model("llama", layers=1)} if guest else {}
        auto = llm.generate(text, 150, strategy_options=options, sampling=sampling, ignore_eos=True)
        assert auto.token_ids == plain.token_ids
        assert auto.drafting is not None and len(auto.drafting["modes"]) == 2 + bool(count) + guest


# ---- the controller, on scripted costs and luck ---------------------------------------------


def simulate(
    right: float,
    steps: int,
    context: int,
    rnd: random.Random,
    partial: float = 0.0,
    noise: float = 0.05,
    left: int | None = None,
) -> tuple[Control, list[str]]:
    """Steps of a made-up decoder: heads right with chance ``right``, partial passes with ``partial``; at the
    first of them ``left`` tokens are to come."""
    costs = Costs(REAL)
    control = Control(costs, {HIDDEN: heads_offer(costs), PARTIAL: partial_offer(costs, 500)})
    seen = []
    for _ in range(steps):
        control.left = left
        mode = control.mode(context)
        seen.append(mode)
        rows, chance, draft = {PLAIN: (1, 0.0, 0.0), HIDDEN: (3, right, 0.2), PARTIAL: (4, partial, 1.7)}[
            mode
        ]
        tokens = 1 + (rnd.random() < chance) + (mode == PARTIAL and rnd.random() < chance)
        expected = 1 + chance * (2 if mode == PARTIAL else 1)
        control.drafted(Drafted(mode, expected, rows))
        spent = REAL.verify(rows, context) * rnd.lognormvariate(0, noise) * (20 if rnd.random() < 0.01 else 1)
        control.record_step(tokens, rows, context, spent, draft)
        left = None if left is None else left - tokens
    return control, seen


@pytest.mark.parametrize("seed", range(5))
def test_useless_heads_are_dropped_fast_and_probed_rarely(seed: int) -> None:
    _, seen = simulate(0.05, 2000, 300, random.Random(seed))
    assert seen[100:].count(PLAIN) >= 0.99 * len(seen[100:])
    assert seen[:60].count(PLAIN) > 10


@pytest.mark.parametrize("seed", range(5))
def test_good_heads_are_used_and_the_baseline_is_probed_rarely(seed: int) -> None:
    control, seen = simulate(0.7, 2000, 300, random.Random(seed))
    assert seen.count(HIDDEN) >= 0.98 * len(seen)
    assert sum(a != b for a, b in pairwise(seen)) < 60  # trials and baselines only
    assert control.rate == pytest.approx(1.7 / (0.2 + REAL.verify(3, 300)), rel=0.15)


def test_partial_passes_take_over_where_they_pay() -> None:
    rnd = random.Random(1)
    _, short = simulate(0.4, 1500, 600, rnd, partial=0.5)
    _, long = simulate(0.4, 1500, 8000, rnd, partial=0.5)
    _, bad = simulate(0.4, 1500, 8000, rnd, partial=0.05)
    assert short.count(PARTIAL) < 0.05 * len(short)
    assert long[200:].count(PARTIAL) > 0.95 * len(long[200:])
    assert bad[200:].count(PARTIAL) < 0.02 * len(bad[200:])
    control, _ = simulate(0.4, 50, 600, rnd, partial=0.5)
    assert 1000 <= (control.pays_from(PARTIAL) or 0) <= 8000


def test_a_cache_is_loaded_where_the_rest_of_the_text_repays_it() -> None:
    """Loading takes four plain steps before it was seen what it takes, and its trial may lose four."""
    _, long = simulate(0.4, 300, 8000, random.Random(1), partial=0.5, left=3000)
    _, short = simulate(0.4, 300, 8000, random.Random(1), partial=0.5, left=20)
    assert long[200:].count(PARTIAL) > 90 and PARTIAL not in short
    control, _ = simulate(0.4, 300, 8000, random.Random(1), partial=0.5)
    control.current, usual = PLAIN, control.modes[PARTIAL].draft_ms
    control.drafted(Drafted(PARTIAL, 2.0, 4, loaded=True))
    control.record_step(2, 4, 8000, REAL.verify(4, 8000), usual + 500.0)
    assert control.modes[PARTIAL].load_ms == 500.0 and control.modes[PARTIAL].draft_ms == usual
    saved = 1 / control.pace(PLAIN, 8000) - 1 / control.pace(PARTIAL, 8000)
    rates = {name: control.pace(name, 8000) for name in (PLAIN, PARTIAL)}
    price, found = 500 + 4 * control.plain_ms(8000), []
    for share in (0.9, 1.1):
        control.left = round(share * 4 * price / saved)
        found.append(control._repays(PARTIAL, rates, 8000))
    assert found == [False, True]


def test_a_mode_is_priced_by_the_rows_that_it_has_in_the_mean() -> None:
    costs = Costs(REAL)
    control = Control(costs, {HIDDEN: heads_offer(costs)})
    mode = control.modes[HIDDEN]
    mode.rows, mode.tokens, mode.draft_ms = 2.25, 1.5, 0.5
    verify = 0.75 * REAL.verify(2, 300) + 0.25 * REAL.verify(3, 300)
    assert control.pace(HIDDEN, 300) == pytest.approx(1.5 / (0.5 + verify))


def test_plain_steps_are_frequent_while_their_price_decides() -> None:
    """Eight of the first ones, if drafting is hardly faster; where it is much faster, as few as later on."""
    control, close = simulate(0.55, 100, 300, random.Random(2), noise=0.0)
    assert 1.05 < control.pace(HIDDEN, 300) / control.pace(PLAIN, 300) < 1.25
    _, clear = simulate(0.95, 100, 300, random.Random(2), noise=0.0)
    assert close[:72].count(PLAIN) == 8 and close[72:].count(PLAIN) <= 1 and clear.count(PLAIN) <= 2


def test_a_plain_decision_is_held_until_a_mode_is_due() -> None:
    """For seven steps at most; for none while prices are in doubt, heads draft or other texts are there."""
    control, _ = simulate(0.02, 400, 300, random.Random(1))
    assert control.current == PLAIN
    control._trial, step = None, control._step
    control.modes[HIDDEN].next_trial = control.modes[PARTIAL].next_trial = step + 100
    assert (control.hold(), control._step) == (7, step + 7)
    control.modes[HIDDEN].next_trial = step + 11
    assert (control.hold(), control._step) == (3, step + 10)
    control.costs.doubtful = True
    assert control.hold() == 0
    control.costs.doubtful, control.current = False, HIDDEN
    assert control.hold() == 0
    control.current = PLAIN
    control.join(BatchLoad(3, 0, 3.0), 300)
    assert control.hold() == 0


def test_matches_of_the_text_end_a_held_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided of a plain text but in the first step; what repeats is drafted all the same."""
    monkeypatch.setattr(Resources, "costs", lambda self: REAL)
    monkeypatch.setattr(Costs, "observe", lambda *args: None)
    monkeypatch.setattr(Control, "hold", lambda self: 10**6)
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
    steps = list(llm.stream([5, 6, 7] * 3 + [9], 120, "auto", sampling=greedy, ignore_eos=True))
    assert sum(step.accepted for step in steps) > 8
    plain = llm.generate([5, 6, 7] * 3 + [9], 120, "autoregressive", sampling=greedy, ignore_eos=True)
    assert [token for step in steps for token in step.token_ids] == plain.token_ids


def test_expectations_are_corrected_by_what_came_of_them() -> None:
    """Of half a token a step, expected for 64 steps, none came; eight tokens count for the expectation."""
    mode = _Mode(1.5, 2, 0.0)
    for _ in range(64):
        mode.judge(1, 1.5)
    assert mode.bias == pytest.approx(max(0.3, 8 / (8 + 32)))
    mode = _Mode(1.5, 2, 0.0)
    for came in (1, 2) * 8:  # every second time
        mode.judge(came, 1.5)
    assert mode.bias == pytest.approx(1.0, abs=0.05)


def test_a_settled_mode_does_not_flap() -> None:
    """At equal worth the noise alone must not switch it back and forth."""
    even = REAL.verify(3, 300) / REAL.verify(1, 300) - 1 + 0.2 / REAL.verify(1, 300)
    for seed in range(4):
        _, seen = simulate(even, 3000, 300, random.Random(seed))
        runs = sum(a != b for a, b in pairwise(seen))
        assert runs < 150


# ---- explanations ---------------------------------------------


def test_explain_has_a_line_a_decision(tmp_path: Path, free: None) -> None:
    llm = LLM.from_model(scripted_model(True), heads=scripted_heads("conditioned"))
    path = tmp_path / "why.jsonl"
    done = llm.generate(prompt(PROMPT), 60, strategy_options={"explain": str(path)}, sampling=GREEDY)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == done.metrics.steps and sum(line["tokens"] for line in lines) == 60
    assert {"mode", "nodes", "expected", "spent_ms", "gained_ms", "context"} <= set(lines[0])
    assert done.drafting is not None and done.drafting["summary"]
    with pytest.raises(InputError, match="explain is"):
        llm.generate([1, 2], 1, strategy_options={"explain": str(tmp_path / "no" / "why")})
    with pytest.raises(InputError, match="explain is"):
        llm.generate([1, 2], 1, strategy_options={"explain": str(tmp_path)})


def test_the_published_rule_keeps_a_fixed_tree(free: None) -> None:
    llm = llm_of("conditioned", True)
    options = {"acceptance": "published"}
    done = llm.generate(prompt(PROMPT), 20, "tokenswift", options, replace(NOISY, seed=1))
    assert done.drafting is None and not done.lossless


def test_chances_are_learnt_without_drafting(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of candidates left out of the tree too: the outcome at their place is known."""
    monkeypatch.setattr(Control, "mode", _always(HIDDEN))
    monkeypatch.setattr(Control, "prices", lambda self, context, most: [1.0, 1e6])  # no row ever pays
    options = {"ngrams": 0, "draft": "hidden"}
    made = llm_of("conditioned", True).generate(
        prompt(PROMPT), 200, strategy_options=options, sampling=GREEDY
    )
    assert made.metrics.mean_acceptance_length == 1 and made.drafting is not None
    best = made.drafting["calibration"][-1]
    assert best["predicted"] > 0.8 and best["observed"] > 0.95 and best["count"] > 40


def test_a_row_is_dearer_beside_other_texts() -> None:
    """The marginal price of a row follows the rows that the pass holds already, and a pass that drafts keeps
    all texts waiting: trees shrink as the batch grows, and vanish."""
    table = Table((1, 4, 8, 16, 64), (10.0, 10.3, 12.0, 20.0, 80.0), (0.0,) * 5, 0.2)
    sizes: list[int] = []
    for others in (0, 3, 7, 15, 40):
        control = Control(Costs(table), {})
        beside = BatchLoad(others, 0, float(others), 0.1 * others) if others else ALONE
        control.join(beside, 100)
        control.mode(100)
        spent = table.verify(1 + others, 100) + 0.1 * others
        assert control.rate == pytest.approx((1 + others) / spent)
        tree = CandidateTree(5)
        node = 0
        for token in range(12):
            node = tree.add(node, token, "head", 0.8)
        nodes, _ = tree.select(control.prices(100, 31), control.rate)
        sizes.append(len(nodes))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 5 and sizes[1] > sizes[3] == sizes[4] == 0, (
        sizes
    )


def test_a_pass_that_drafts_keeps_the_other_texts_waiting() -> None:
    """A source of passes that pays for one text does not for eight."""
    rates: dict[int, float] = {}
    for others in (0, 7):
        control = Control(
            Costs(REAL), {PARTIAL: CostEstimate("passes", "the passes", 2.5, 4, 0.5, pass_ms=0.5)}
        )
        control.join(BatchLoad(others, 100 * others, float(others)), 100)
        rates[others] = control.pace(PARTIAL, 100) / control.pace(PLAIN, 100)
    assert rates[0] > 1 > rates[7], rates


def test_little_is_decided_beside_texts_that_make_rows_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor drafted; from the step on in which the text is alone again, every step is decided for."""
    dear = Table((1, 32), (1.0, 32.0), (0.0, 0.0), 1.0, 1.0)
    monkeypatch.setattr(Resources, "costs", lambda self: dear)
    monkeypatch.setattr(Costs, "observe", lambda *args: None)
    decided: list[int] = []
    real = Control.mode

    def counted(self: Control, context: int) -> str:
        decided.append(context)
        return real(self, context)

    monkeypatch.setattr(Control, "mode", counted)
    llm = llm_of("conditioned", True)
    how: dict[str, Any] = {"sampling": NOISY, "ignore_eos": True}
    plain = llm.generate(prompt(PROMPT), 75, "autoregressive", **how)
    monkeypatch.setattr("tokenswift.engine.step.ALONE", BatchLoad(6, 0, 6.0))
    steps = llm.stream(prompt(PROMPT), 75, **how)
    made = [next(steps) for _ in range(56)]
    assert sum(step.drafted for step in made) == 0 and 4 <= len(decided) <= 8
    monkeypatch.setattr("tokenswift.engine.step.ALONE", ALONE)
    before = len(decided)
    made += [next(steps) for _ in range(3)]
    assert len(decided) == before + 3
    made += list(steps)
    figures = steps.result.drafting
    assert steps.result.token_ids == plain.token_ids and figures is not None
    assert sum(mode["tokens"] for mode in figures["modes"].values()) == 75
    assert sum(mode["steps"] for mode in figures["modes"].values()) == len(made)
