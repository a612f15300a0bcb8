"""Measured costs in the cache folder: whatever lies there, and however busy the machine was."""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.cli.progress import summary
from tokenswift.runs import folder as folders
from tokenswift.runs.listing import summary_of
from tokenswift.spec.adaptive import cost as prices
from tokenswift.spec.adaptive.controller import Control, Drafted
from tokenswift.spec.adaptive.cost import BUSY, Costs, Table, measure
from tokenswift.spec.drafters.heads import HIDDEN, heads_offer
from tokenswift.spec.drafters.model import MODEL, model_offer
from tokenswift.spec.drafters.partial import PARTIAL, partial_offer
from tokenswift.spec.methods import resources
from tokenswift.tree import CandidateTree

TABLE = Table((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), (0.01, 0.01, 0.02, 0.04), 0.5)
GOOD = {"rows": [1, 2], "fixed": [1.0, 2.0], "token": [0.001, 0.002], "level": 0.1}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=None)


def kept_table(*args: Any) -> Table:
    """The table of a model, once it is in its folder."""
    table = prices.kept_table(*args)
    prices.WRITER.submit(int).result()
    return table


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
    {**GOOD, "waited": 1.1},
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
    monkeypatch.setattr(resources, "measure", lambda *how, **more: TABLE)
    path = place(llm, tmp_path / "costs")
    whole = path.read_bytes()
    given = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    llm.resources._costs.clear()
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
        control.record_step(2, 2, 500, 2.0, 0.1)
    assert 0 < control.rate < math.inf


def test_a_busy_machine_is_measured_once(tmp_path: Path, llm: LLM) -> None:
    """However busy it was: the next starts take the table that is there."""
    made = []

    def start(waited: float) -> Table:
        def make() -> Table:
            made.append(waited)
            return replace(TABLE, waited=waited)

        return kept_table(llm.target, tmp_path, make)

    assert start(3 * BUSY) == start(0.9) == start(0.0) == replace(TABLE, waited=3 * BUSY)
    assert made == [3 * BUSY]


def test_a_folder_that_does_not_answer_keeps_no_text_waiting(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's, say, that hangs while a table is written."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    reached, answers, replacing = threading.Event(), threading.Event(), prices.replacing

    @contextmanager
    def hanging(path: Path) -> Iterator[Path]:
        reached.set()
        assert answers.wait(60)
        with replacing(path) as part:
            yield part

    monkeypatch.setattr(prices, "replacing", hanging)
    done: list[Table] = []

    def text_ends() -> None:
        llm.resources.learn_costs(TABLE)
        done.append(llm.resources.costs())

    text = threading.Thread(target=text_ends, daemon=True)
    text.start()
    text.join(20)
    assert reached.wait(20) and done == [TABLE] and not list(tmp_path.rglob("*.json"))
    answers.set()
    prices.WRITER.submit(int).result()
    assert list(tmp_path.rglob("*.json"))
    llm.resources._costs.clear()


class Machine:
    """Steps as adaptive drafting makes them, of a chain of likely candidates, with times of its own."""

    def __init__(self, truth: Table, slow: float = 1.0) -> None:
        self.truth, self.slow = truth, slow

    def run(self, table: Table, steps: int = 200) -> tuple[Costs, float]:
        """A run that begins with a table; its tokens a millisecond."""
        costs, tokens, spent = Costs(table), 0.0, 0.0
        control = Control(costs, {})
        for _ in range(steps):
            control.mode(100)
            tree, leaf = CandidateTree(5), 0
            for token in range(10):
                leaf = tree.add(leaf, 6 + token, "ngram", 0.95)
            nodes, expected = tree.select(control.prices(100, 31), control.rate)
            took = self.slow * self.truth.verify(1 + len(nodes), 100)
            control.drafted(Drafted("plain", 1 + expected, 1 + len(nodes)))
            control.record_step(1 + round(expected), 1 + len(nodes), 100, took, 0.0)
            tokens, spent = tokens + 1 + expected, spent + took
        return costs, tokens / spent


TRUTH = Table((1, 2, 4, 8, 16), (10.0, 10.5, 11.0, 13.0, 17.0), (0.01,) * 5, 0.5)
WRONG = Table((1, 2, 4, 8, 16), (12.0, 30.0, 60.0, 130.0, 260.0), (0.01,) * 5, 2.0, waited=0.7)


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_a_table_of_a_busy_machine_heals_by_what_steps_take(slow: float) -> None:
    """It says that drafting does not pay; a few runs later all that pays is drafted, busy or not."""
    table, machine = WRONG, Machine(TRUTH, slow)
    best, plain = machine.run(TRUTH)[1], 1 / (slow * TRUTH.verify(1, 100))
    assert best > 3 * plain
    if slow == 1.0:  # believed, it would stay as it is
        assert machine.run(replace(WRONG, waited=0.0))[1] == pytest.approx(plain)
    for _ in range(3):
        learned = machine.run(table)[0].learned()
        assert learned is not None
        table = learned
    assert table.waited < BUSY and not Costs(table).doubtful
    assert machine.run(table)[1] > 0.95 * best


def test_drafting_that_was_measured_on_a_busy_machine_is_tried() -> None:
    """A level or a pass in few bits took at most what was measured, and the waiting is no part of it; what is
    taken for less stays so when the doubt is gone, and steps correct it as ever."""
    costs = Costs(WRONG)
    assert costs.level() == pytest.approx(0.3 * 2.0)
    for i in range(200):
        costs.observe(1 + i % 2, 100, 2 * WRONG.verify(1 + i % 2, 100))
    table = costs.learned()
    assert table is not None and table.waited < BUSY
    assert table.level == pytest.approx(0.3 * 2.0)
    assert Costs(table).level() == pytest.approx(0.3 * 2.0)


def test_what_steps_show_is_kept_but_not_the_load_of_the_machine() -> None:
    for load, kept in ((3.0, 1.0), (1.0, 1.0), (0.5, 0.5)):
        costs = Costs(TABLE)
        for i in range(160):
            rows = (1, 2, 4)[i % 3]
            costs.observe(rows, 100, load * TABLE.verify(rows, 100) * (1.5 if rows == 4 else 1.0))
        table = costs.learned()
        assert table is not None
        assert table.verify(1, 100) == pytest.approx(kept * TABLE.verify(1, 100), rel=0.05)
        assert table.verify(4, 100) == pytest.approx(kept * 1.5 * TABLE.verify(4, 100), rel=0.05)
        assert table.level == pytest.approx(kept * TABLE.level, rel=0.05)
    assert Costs(TABLE).learned() is None


def test_many_runs_do_not_wear_a_table_out() -> None:
    """Times scatter, and the machine is sometimes slower: prices stay what they are, and in proportion."""
    draw, table = random.Random(1), TABLE
    for _ in range(100):
        costs, speed = Costs(table), draw.uniform(1.0, 1.5)
        counts = draw.choice(((1, 1, 1, 2), (2, 2, 2, 2, 1), (1, 2, 3, 4)))
        for i in range(300):
            rows = counts[i % len(counts)]
            costs.observe(rows, 100, speed * TABLE.verify(rows, 100) * draw.lognormvariate(0, 0.2))
        table = costs.learned() or table
    for rows in (1, 2, 4):
        assert 0.7 < table.verify(rows, 100) / TABLE.verify(rows, 100) < 1.2
    assert 0.7 < table.level / TABLE.level < 1.2


def test_a_run_hands_its_costs_to_the_next_and_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    slow = replace(TABLE, fixed=(1e6, 1.1e6, 1.2e6, 1.3e6), waited=0.5)
    made: list[Table] = []
    monkeypatch.setattr(resources, "measure", lambda *how, **more: made.append(slow) or slow)
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    plain = llm.generate(PROMPT, 150, "autoregressive", ignore_eos=True).token_ids
    assert llm.generate(PROMPT, 150, ignore_eos=True).token_ids == plain
    (path,) = (tmp_path / "costs").iterdir()
    kept = json.loads(path.read_text())
    assert kept["fixed"][0] < 1e5 and kept["waited"] < 0.5
    lists = {k: tuple(kept[k]) for k in ("rows", "fixed", "token")}
    assert asdict(llm.resources.costs()) == {**kept, **lists}
    again = LLM.from_model(tiny_model("llama"), heads=None)
    assert again.generate(PROMPT, 150, ignore_eos=True).token_ids == plain
    assert made == [slow]  # by the first run alone


def test_measuring_is_counted_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that measuring moves far: it is neither the prompt's time nor that of the steps, in the
    figures, in the journal and in what is said of a run."""
    clock = [0.0]

    def slow(*how: Any, **more: Any) -> Table:
        clock[0] += 100.0
        return TABLE

    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resources, "measure", slow)

    def tick() -> float:
        clock[0] += 1e-3
        return clock[0]

    def apart(calibration: float, prefill: float, decoding: float) -> bool:
        return 100 <= calibration < 100.1 and 0 < prefill < 0.1 and 0 < decoding < 1

    monkeypatch.setattr("tokenswift.metrics.perf_counter", tick)
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    folder = tmp_path / "run"
    result = llm.generate(PROMPT, 20, ignore_eos=True, run_dir=str(folder))
    metrics = result.metrics
    assert apart(metrics.calibration_seconds, metrics.prefill_seconds, metrics.seconds)
    assert "calibration" not in metrics.phases
    assert folders.load(folder)[1].seconds["calibration"] == metrics.calibration_seconds
    listed = summary_of(folder)
    assert apart(listed["calibration_seconds"], listed["prefill_seconds"], listed["seconds"])
    assert "100.0 s" not in summary(result)
    assert "100.0 s of measuring what passes cost" in summary(result, verbose=True)
    assert llm.generate(PROMPT, 20, ignore_eos=True).metrics.calibration_seconds < 0.1


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
