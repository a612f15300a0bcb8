"""Biases, presence and frequency penalties, DRY and what may not come: against plain reference
code."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.chats import calling_tokenizer
from tokenswift.config.sampling import ADJUSTING, SamplingParams, settings_of
from tokenswift.sampling import text_rules
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.text_rules import RecentBreakers, TextRules, rules_of
from tokenswift.types import InputError

V = 200
OFF: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
DRY: dict[str, object] = {"dry_multiplier": 0.8}
SETTINGS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.3, "penalty_window": 9},
    "both": {"presence_penalty": -0.5, "frequency_penalty": 1.1},
    "dry": DRY,
    "dry of a range": {**DRY, "dry_range": 12, "dry_base": 3.0, "dry_allowed_length": 1},
    "dry of a flat base": {**DRY, "dry_base": 1.0, "dry_allowed_length": 3},
    "bias": {"logit_bias": {3: 4.0, 7: -100, 150: 0.1}},
    "ends": {"min_tokens": 12},
    "words": {"bad_words": [[5], [4, 6], [1, 2, 3]]},
}
ALL: dict[str, Any] = {key: value for one in SETTINGS.values() for key, value in one.items()}
ALL |= {"repetition_penalty": 1.2, "temperature": 0.8, "min_p": 0.01}
RULES = {"ends": (0, 9), "breakers": (11, 30), "words": ((5,), (4, 6), (1, 2, 3))}


def texts_of(rnd: random.Random) -> tuple[list[int], list[list[int]]]:
    """A text of few tokens, so that it repeats itself, and paths after it."""
    few = rnd.choice([(1, 2, 3), (1, 2, 3, 4, 6, 11), (7,), tuple(range(40))])
    history = [rnd.choice(few) for _ in range(rnd.choice([1, 2, 30, 90]))]
    return history, [[rnd.choice(few) for _ in range(n)] for n in (0, 1, 2, 7)]


def lengths(text: list[int], breakers: tuple[int, ...]) -> dict[int, int]:
    """The longest repetition that each token would lengthen, place by place."""
    longest: dict[int, int] = {}
    for end in range(1, len(text)):
        n = 0
        while n < end and text[end - 1 - n] == text[-1 - n] and text[-1 - n] not in breakers:
            n += 1
        if text[end] not in breakers:
            longest[text[end]] = max(longest.get(text[end], 0), n)
    return longest


def losses(text: list[int], position: int, p: SamplingParams, rules: TextRules) -> dict[int, float]:
    """What each token loses, by the definitions, place by place."""
    lost: dict[int, float] = {}
    window = text[max(rules.start, position - p.penalty_window) :]
    for token in set(window):
        lost[token] = p.presence_penalty + p.frequency_penalty * window.count(token)
    if p.dry_multiplier and position == len(text):
        newest = text if p.dry_range < 0 else text[-p.dry_range :]
        for token, n in lengths(newest, rules.breakers).items():
            if n >= p.dry_allowed_length:
                loss = p.dry_multiplier * p.dry_base ** (n - p.dry_allowed_length)
                lost[token] = lost.get(token, 0.0) + loss
    for word in rules.words:
        begin = list(word[:-1])
        if not begin or (position == len(text) and text[len(text) - len(begin) :] == begin):
            lost[word[-1]] = float("inf")
    if position - rules.start < p.min_tokens:
        lost |= dict.fromkeys(rules.ends, float("inf"))
    for token, bias in p.biases:
        lost[token] = lost.get(token, 0.0) - bias
    return lost


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_tokens_lose(setting: str) -> None:
    """Each processor alone, row by row, gaps before the position included."""
    rnd = random.Random(setting)
    moved = 0
    params = SamplingParams(**OFF | SETTINGS[setting])
    for _ in range(12):
        history, paths = texts_of(rnd)
        rules = TextRules(rnd.randrange(len(history) + 1), **RULES if setting != "bias" else {})
        if setting != "words":
            rules = replace(rules, words=())
        gaps = [rnd.choice([0, 0, 0, 3]) for _ in paths]
        positions = [len(history) + len(path) + gap for path, gap in zip(paths, gaps, strict=True)]
        scores = Sampler(params, V, rules=rules).scores(
            torch.zeros(4, V), history, paths, positions
        )
        for row, path, position in zip(scores, paths, positions, strict=True):
            expected = torch.zeros(V, dtype=torch.float64)
            for token, loss in losses(history + path, position, params, rules).items():
                expected[token] -= loss
            torch.testing.assert_close(row.double(), expected, rtol=1e-5, atol=1e-6)
            moved += int((row != 0).sum())
    assert moved


def test_ends_that_the_model_does_not_have_are_left_out() -> None:
    """A stop may name any id."""
    params = SamplingParams(**OFF, greedy=True, min_tokens=2)
    logits = torch.zeros(1, V).index_fill(1, torch.tensor([3, 4]), 1.0)
    sampler = Sampler(params, V, rules=rules_of(params, None, V, 1, (3, V, 10 * V)))
    assert sampler.choose(logits, [1], [[]]) == [4]


def test_settings_by_name() -> None:
    """Fields that are off are not named, the others come back."""
    defaults = settings_of(SamplingParams())
    assert not defaults.keys() & {*ADJUSTING}
    assert SamplingParams(**defaults) == SamplingParams()
    params = SamplingParams(**ALL, dry_breakers=["\n", [4]])
    assert SamplingParams(**settings_of(params)) == params


BAD: list[tuple[str, object]] = [
    ("presence_penalty", 2.1),
    ("frequency_penalty", "much"),
    ("dry_multiplier", -1),
    ("dry_base", 0.9),
    ("dry_allowed_length", 0),
    ("dry_range", 0),
    ("dry_breakers", [""]),
    ("logit_bias", {5: 101}),
    ("logit_bias", {"x": 1}),
    ("min_tokens", -1),
    ("bad_words", [[-1]]),
    ("bad_words", ["a"] * 2000),
    ("bad_words", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} (is|holds) .*valid: "):
        SamplingParams(**{name: value})


def test_breakers_that_were_used_last_are_kept_and_counted() -> None:
    recent = RecentBreakers(most=10)
    for number in range(60):
        recent.add((str(number),), (1, 2, 3))
        assert recent.size <= 10
    assert len(recent) == 2
    assert recent.get(("58",)) == (1, 2, 3)
    recent.add(("new",), (4,))
    recent.add(("newer",), (5, 6))
    assert recent.get(("59",)) is None
    assert recent.get(("58",)) == (1, 2, 3)
    recent.add(("too many",), tuple(range(11)))
    assert recent.get(("too many",)) is None
    assert recent.size <= 10


def test_many_breakers_of_one_tokenizer_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rules, "MOST_KEPT_BREAKERS", 500)
    tokenizer = calling_tokenizer()
    for number in range(50):
        params = SamplingParams(dry_multiplier=1.0, dry_breakers=["e", str(number)])
        rules_of(params, tokenizer, 500)
    assert 0 < text_rules.recent_breakers(tokenizer).size <= 500
