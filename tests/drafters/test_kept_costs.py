"""Measured costs in the cache folder: whatever lies there, and however busy the machine was."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.drafters.auto import prices
from tokenswift.drafters.auto.control import Control, Drafted
from tokenswift.drafters.auto.prices import BUSY, Costs, Table, kept_table, measure
from tokenswift.drafters.heads import HIDDEN, heads_offer
from tokenswift.drafters.model import MODEL, model_offer
from tokenswift.drafters.partial import PARTIAL, partial_offer

TABLE = Table((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), (0.01, 0.01, 0.02, 0.04), 0.5)
GOOD = {"rows": [1, 2], "fixed": [1.0, 2.0], "token": [0.001, 0.002], "level": 0.1}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=None)


def place(llm: LLM, folder: Path) -> Path:
    """The file of a model's costs, made."""
    kept_table(llm.target, folder, lambda: TABLE)
    (path,) = folder.iterdir()
    return path


BAD: list[Any] = [
    {**GOOD, "fixed": [0.0, 0.0]},
    {**GOOD, "fixed": [0, 0], "token": [0, 0]},
    {**GOOD, "rows": [], "fixed": [], "token": []},
    {**GOOD, "rows": []},
    {**GOOD, "fixed": [1.0]},
    {**GOOD, "token": [0.1, 0.2, 0.3]},
    {**GOOD, "fixed": ["1", "2"]},
    {**GOOD, "rows": "12"},
    {**GOOD, "rows": [1, 1]},
    {**GOOD, "rows": [2, 1]},
    {**GOOD, "rows": [2, 3]},
    {**GOOD, "rows": [0, 1]},
    {**GOOD, "rows": [1, 10**9]},
    {**GOOD, "rows": [True, 2]},
    {**GOOD, "fixed": [1.0, -2.0]},
    {**GOOD, "fixed": [1.0, 1e300]},
    {**GOOD, "token": [1.0, -2.0]},
    {**GOOD, "level": -1.0},
    {**GOOD, "level": None},
    {**GOOD, "level": "0.1"},
    {**GOOD, "waited": "none"},
    {**GOOD, "waited": 2 * BUSY},
    {},
    [],
    None,
    "costs",
    "{",
    "",
    "[" * 100_000,
    '{"rows": [1], "fixed": [NaN], "token": [0.0], "level": 0.0}',
    '{"rows": [1], "fixed": [1e999], "token": [0.0], "level": 0.0}',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("content", BAD, ids=lambda content: str(content)[:50])
def test_a_bad_file_is_measured_again(
    content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """The automatic run is as ever, and the file is good again."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    monkeypatch.setattr("tokenswift.engine.llm.measure", lambda *how, **more: TABLE)
    path = place(llm, tmp_path / "costs")
    whole = path.read_bytes()
    given = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    llm._costs.clear()
    assert len(llm.generate(PROMPT, 20, ignore_eos=True).token_ids) == 20
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["folder", "pipe", "dead link", "unreadable"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path, llm: LLM) -> None:
    path = place(llm, tmp_path)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dead link":
        path.symlink_to(tmp_path / "nowhere" / "else")
    else:
        path.write_text("")
        path.chmod(0)
    assert kept_table(llm.target, tmp_path, lambda: TABLE) == TABLE


def test_a_good_file_is_used(tmp_path: Path, llm: LLM) -> None:
    path = place(llm, tmp_path)
    path.write_text(json.dumps(GOOD))
    read = kept_table(llm.target, tmp_path, lambda: pytest.fail("measured again"))
    assert read == Table((1, 2), (1.0, 2.0), (0.001, 0.002), 0.1)


NUMBERS = st.integers(-3, 2**66) | st.floats() | st.sampled_from([0, 1, 1e-300, 1e7, 1e308])
VALUES = st.none() | st.booleans() | st.text(max_size=3) | NUMBERS | st.lists(NUMBERS, max_size=4)
FILES = (
    st.binary(max_size=200)
    | st.fixed_dictionaries({}, optional=dict.fromkeys([*GOOD, "waited", "more"], VALUES)).map(
        lambda found: json.dumps(found).encode()
    )
    | st.tuples(st.sampled_from([*GOOD, "waited"]), VALUES).map(
        lambda pair: json.dumps({**GOOD, pair[0]: pair[1]}).encode()
    )
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=FILES)
def test_a_file_of_any_content_gives_a_table_that_can_be_used(
    content: bytes, tmp_path: Path, llm: LLM
) -> None:
    folder = tmp_path / "costs"
    path = next(folder.iterdir()) if folder.is_dir() else place(llm, folder)
    path.write_bytes(content)
    table = kept_table(llm.target, folder, lambda: TABLE)
    assert path.read_bytes() == (content if table != TABLE else path.read_bytes())
    prices = Costs(table)
    for context in (0, 100, 10**6):
        for rows in (1, 2, 5, 40):
            assert 0 < prices.verify(rows, context) < math.inf
            prices.observe(rows, context, 3.0)
    offers = {HIDDEN: heads_offer(prices), PARTIAL: partial_offer(prices, 100), MODEL: model_offer(1.0)}
    control = Control(prices, offers)
    for _ in range(3):
        name = control.mode(500)
        control.drafted(Drafted(name, 1.5, 2, passes=1, levels=1))
        control.took(2, 2, 500, 2.0, 0.1)
    assert 0 < control.rate < math.inf


def test_costs_of_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """Two processes' starts on a busy machine, then one on a quiet one: measured each time, kept at last."""
    made = []

    def start(waited: float) -> Table:
        def make() -> Table:
            made.append(waited)
            return replace(TABLE, waited=waited)

        return kept_table(llm.target, tmp_path, make)

    assert start(3 * BUSY).waited == 3 * BUSY
    assert list(tmp_path.iterdir()) == []
    start(1.01 * BUSY)
    assert list(tmp_path.iterdir()) == []
    assert start(BUSY / 2) == start(0.9) == replace(TABLE, waited=BUSY / 2)
    assert made == [3 * BUSY, 1.01 * BUSY, BUSY / 2]
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(asdict(replace(TABLE, waited=0.5))))  # of a busy while after all
    assert start(0.0).waited == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_measuring_says_how_long_it_waited_for_a_core(
    share: float, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """By the system's own account of threads that could run and did not."""
    clock = iter([(1.0, 5.0), (1.0 + 3 * (1 - share), 5.0 + 3 * share)])
    monkeypatch.setattr(prices, "_ran_and_waited", lambda: next(clock))
    assert measure(llm.target, seconds=0.0).waited == pytest.approx(share)


def test_without_that_account_the_load_tells(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(prices, "_ran_and_waited", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, waited in ((0.3, 0.0), (4.0, 0.0), (8.0, 0.5)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert measure(llm.target, seconds=0.0).waited == pytest.approx(waited)


def test_the_account_is_of_all_threads() -> None:
    found = prices._ran_and_waited()
    if found is None:
        pytest.skip("this system keeps no account")
    sum(i * i for i in range(200_000))
    after = prices._ran_and_waited()
    assert after is not None and after[0] > found[0] and after[1] >= found[1] >= 0
