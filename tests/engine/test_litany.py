"""The guard against litanies: texts in one form are seen, sound texts of all kinds are not."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import HOT
from tokenswift import LLM
from tokenswift.engine import litany
from tokenswift.engine.litany import EVERY, LitanyGuard
from tokenswift.runs import folder as folders
from tools.litanies import litany_of

ROOT = Path(__file__).parents[2]
PROMPTS = sorted((ROOT / "src/tokenswift/data/prompts").glob("*.txt"))
SOURCES = sorted((ROOT / "src/tokenswift").rglob("*.py")) + sorted((ROOT / "docs").glob("*.md"))
SOUND = sorted((ROOT / "tests/data/sound").iterdir())
NOUNS = "the tide,the lamp,the harbour,my brother,the rope,the winter,the letter,the boat".split(
    ","
)
VERBS = ["heard", "wanted", "feared", "remembered", "understood", "loved"]


def refrain(start: str, chance: random.Random) -> Iterator[str]:
    """Sentences that open alike; no two neighbours are the same."""
    while True:
        yield f"{start} {chance.choice(VERBS)} {chance.choice(NOUNS)}."


def litanies() -> dict[str, str]:
    """Texts in one form, of about 700 words each."""
    chance = random.Random(5)
    no_longer = itertools.islice(refrain("I no longer", chance), 120)
    questions = (
        f"Would you rather keep {noun}? Would you sell {other}?"
        for noun, other in zip(
            chance.choices(NOUNS, k=70), chance.choices(NOUNS, k=70), strict=True
        )
    )
    chain = (
        f"The end of {a} is the end of {b}."
        for a, b in zip(chance.choices(NOUNS, k=70), chance.choices(NOUNS, k=70), strict=True)
    )
    two = itertools.chain.from_iterable(
        zip(refrain("She never", chance), refrain("He always", chance), strict=True)
    )
    return {
        "one opening": " ".join(no_longer),
        "questions": "\n\n".join(questions),
        "a chain": " ".join(chain),
        "two openings": " ".join(itertools.islice(two, 150)),
    }


@pytest.mark.parametrize("name", litanies())
def test_a_litany_is_seen(name: str) -> None:
    assert litany_of(litanies()[name]) is not None


def test_a_litany_behind_prose_begins_where_it_begins() -> None:
    prose = PROMPTS[0].read_text(encoding="utf-8")[:6000]
    seen = litany_of(prose + litanies()["one opening"])
    assert seen is not None
    assert seen.opening == "i no"
    assert abs(4 * seen.start - len(prose)) < 1200


@pytest.mark.parametrize("path", [*PROMPTS, *SOUND], ids=lambda path: path.name)
def test_shipped_prompts_and_sound_texts_raise_no_alarm(path: Path) -> None:
    assert litany_of(path.read_text(encoding="utf-8")) is None


def test_program_code_and_documentation_raise_no_alarm() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES[::5])
    assert litany_of(text) is None


def tables() -> dict[str, str]:
    """A table of 300 rows in the forms in which models write one."""
    chance = random.Random(7)
    rows = [
        {"place": chance.choice(NOUNS), "verb": chance.choice(VERBS), "count": chance.randrange(99)}
        for _ in range(300)
    ]
    comma = io.StringIO()
    writer = csv.DictWriter(comma, list(rows[0]))
    writer.writerows(rows)
    lines = [f"| {row['place']} | {row['verb']} | {row['count']} |" for row in rows]
    return {
        "csv": comma.getvalue(),
        "json": json.dumps(rows, indent=1),
        "markdown": "\n".join(lines),
        "contents": "\n\n".join(f"    CHAPTER {row['count']}" for row in rows * 3),
    }


@pytest.mark.parametrize("name", tables())
def test_tables_raise_no_alarm(name: str) -> None:
    assert litany_of(tables()[name]) is None


def test_a_litany_that_ends_is_over() -> None:
    guard = LitanyGuard()
    for piece in litanies()["one opening"].split(" "):
        guard.push(f"{piece} ")
    assert guard.litany is not None
    for piece in PROMPTS[0].read_text(encoding="utf-8").split(" ")[:600]:
        guard.push(f"{piece} ")
    assert guard.litany is None
    assert guard.first is not None


# ---- in a run ------------------------------------------------------------------------------------


@pytest.fixture
def alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text looks like a litany."""
    form = litany.Form(0.1, 0.1, 1.0, 1.0, "i no")
    monkeypatch.setattr(litany, "form_of", lambda text: form)
    monkeypatch.setattr(litany.LitanyGuard, "_window", lambda self: (5, ""))


LENGTH = 4 * EVERY - 20
SAMPLING = replace(HOT, seed=8)


@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("strategy", ["autoregressive", "tokenswift", "auto"])
def test_stop_ends_it_at_the_same_token_whatever_drafts(long_llm: LLM, strategy: str) -> None:
    call: dict[str, Any] = {"sampling": SAMPLING, "ignore_eos": True, "strategy": strategy}
    stopped = long_llm.generate("hello", LENGTH, on_loop="stop", **call)
    assert stopped.finish_reason == "loop"
    assert len(stopped.token_ids) == 3 * EVERY


@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("on_loop", ["report", "copies"])
def test_elsewhere_it_is_only_reported(long_llm: LLM, on_loop: str) -> None:
    call: dict[str, Any] = {"sampling": SAMPLING, "ignore_eos": True, "on_loop": on_loop}
    text = long_llm.generate("hello", LENGTH, **call)
    assert text.finish_reason == "length"
    assert text.metrics.litany is not None


@pytest.mark.usefixtures("alarmed")
def test_the_journal_says_where_it_began(long_llm: LLM, tmp_path: Path) -> None:
    call: dict[str, Any] = {"sampling": SAMPLING, "ignore_eos": True, "run_dir": tmp_path / "run"}
    text = long_llm.generate("hello", LENGTH, **call)
    assert folders.load(tmp_path / "run")[1].litany == text.metrics.litany


@pytest.fixture(scope="module")
def long_llm() -> LLM:
    return LLM.from_model(tiny_model(max_position_embeddings=512), tiny_tokenizer())
