"""A drafter of another package: one class behind an entry point, which everything then names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.spec.drafters.prices import fix_prices
from tests.spec.drafters.scripted import prompt, scripted_model
from tests.spec.drafters.test_accepted import GREEDY, PROMPT
from tokenswift import LLM, InputError, SamplingParams
from tokenswift.config import AutoOptions
from tokenswift.runs import folder as folders
from tokenswift.runs.report import page
from tokenswift.spec.drafters import registry
from tokenswift.spec.drafters.drafter import (
    Candidates,
    CostEstimate,
    Costs,
    DraftSource,
    Need,
    Outcome,
    Ranked,
    Setting,
    Source,
)
from tokenswift.spec.methods import STRATEGIES
from tokenswift.spec.strategy import TokenSequence

# ---- the drafter: all that a package of its own would hold ----


class Pairs:
    """Drafts what has followed the two newest tokens before: counts of trigrams, three tokens ahead."""

    mark = DraftSource("pairs", "P", "pair of <tokens>", "#7a1fa2", "#e0b0ff")
    name = mark.name
    ahead, shift = 3, 0

    def __init__(self, setting: Setting) -> None:
        self.vocab_size = setting.model.vocab_size
        self.refusals = Source("counts of pairs")
        self.followers: dict[tuple[int, int], dict[int, int]] = {}
        self.known = 0

    def needs(self, text: int, row: int) -> list[Need]:
        return [Need("pairs", "installed", 100 * text)]

    def begin(self, sequence: TokenSequence) -> None:
        self._read(sequence.tokens)

    def offer(self, costs: Costs) -> CostEstimate:
        return CostEstimate("counts of pairs", "the counts of pairs", tokens=2.0, rows=4, price=0.01)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        node, text = 0, sequence.tokens
        for level in range(self.ahead):
            before, newest = (text + candidates.path(node))[-2:]
            counts = self.followers.get((before, newest), {})
            if not counts:
                return
            best = sorted(counts, key=lambda token: counts[token], reverse=True)[:3]
            total = sum(counts.values())
            shares = [counts[token] / total for token in best]
            tokens = [(token + self.shift) % self.vocab_size for token in best]
            below = candidates.offer(node, Ranked(tokens, shares, shares), level)
            node = below[0][0]

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        self._read(sequence.tokens)

    def _read(self, text: list[int]) -> None:
        for at in range(max(2, self.known), len(text)):
            counts = self.followers.setdefault((text[at - 2], text[at - 1]), {})
            counts[text[at]] = counts.get(text[at], 0) + 1
        self.known = len(text)


# ---- what comes of it ----


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A call that makes drafters of this file known by entry points, and no others."""

    def known(*names: str) -> None:
        points = [EntryPoint(name.lower(), f"{__name__}:{name}", registry.GROUP) for name in names]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry.refresh()

    yield known
    monkeypatch.undo()
    registry.refresh()


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are those of a table and drafting takes next to nothing, whatever the clock says."""
    fix_prices(monkeypatch, 1 / 9)


def is_used(done: Any) -> bool:
    """Whether most of a text came from the drafter of this file."""
    own = sum(n for name, n in done.token_sources.items() if name in ("pairs", "wrong"))
    return own > 60 and done.metrics.mean_acceptance_length > 3


def made(folder: Path | None, params: SamplingParams = GREEDY, new: int = 120, **options: Any) -> Any:
    """The model and what it wrote, with what is installed alone to draft from."""
    llm = LLM.from_model(scripted_model(params is GREEDY), heads=None)
    given = {"ngrams": 0, "draft": "hidden", **options}
    return llm, llm.generate(prompt(PROMPT), new, strategy_options=given, sampling=params, run_dir=folder)


def test_it_is_used_and_named_everywhere(install: Any, priced: None, tmp_path: Path) -> None:
    install("Pairs")
    why = tmp_path / "why.jsonl"
    llm, done = made(tmp_path / "run", explain=str(why))
    plain = llm.generate(prompt(PROMPT), 120, "autoregressive", sampling=GREEDY)
    assert done.token_ids == plain.token_ids
    assert is_used(done)
    assert done.token_sources["pairs"] == 120 - done.token_sources["target"]
    assert done.draft_source == "pair of <tokens>"
    # the memory plan
    options = AutoOptions(ngrams=0, draft="hidden")
    planned = STRATEGIES["auto"].build(llm.resources, options, llm.target.sampler(GREEDY))
    assert Need("pairs", "installed", 17_000) in planned.needs(170, 1)
    # control, calibration
    assert done.drafting["modes"]["pairs"]["steps"] > 0.8 * done.metrics.steps
    assert done.drafting["summary"].startswith("counts of pairs in ")
    assert len(done.drafting["weights"]["pairs"]) == 2
    bins = done.drafting["calibration"]
    assert sum(row["count"] for row in bins) > 50 and all(row["observed"] > 0.9 for row in bins)
    # explanations
    lines = [json.loads(line) for line in why.read_text().splitlines()]
    assert sum(line["mode"] == "pairs" and line["nodes"] > 0 for line in lines) > 0.8 * len(lines)
    # journal, report
    state = folders.load(tmp_path / "run")[1]
    assert state.sources.count("P") == done.token_sources["pairs"]
    html = page(state, "run")
    assert (
        "pair of &lt;tokens&gt;" in html
        and "<k-p>" in html
        and "k-p{color:light-dark(#7a1fa2,#e0b0ff)" in html
    )


class Unmarked:
    """No drafter."""


class Taken(Pairs):
    """Its name is another's."""

    mark = DraftSource("head", "X", "x")


class Small(Pairs):
    """Its letter is one that the library may want."""

    mark = DraftSource("small", "s", "x")


class Coloured(Pairs):
    """Its colour would be more than one."""

    mark = DraftSource("coloured", "X", "x", "red;}body{display:none")


class Idle:
    """It does nothing."""

    mark = DraftSource("idle", "I", "idle")


@pytest.mark.parametrize(
    "name,line",
    [
        ("Idle", "has no needs; valid: a class with the methods"),
        ("Unmarked", "has no mark; valid: "),
        ("Missing", "has AttributeError .*; valid: a class that can be imported"),
        ("Taken", "has the name 'head'; valid: "),
        ("Small", "has the letter 's'; valid: one of A to Z"),
        ("Coloured", "has the colour 'red;.*; valid: # and six"),
    ],
)
def test_what_is_no_drafter_is_named(install: Any, name: str, line: str) -> None:
    install(name)
    with pytest.raises(InputError, match=rf"^the installed drafter {name.lower()} \([^\n]*:{name}\) {line}"):
        registry.marks()
