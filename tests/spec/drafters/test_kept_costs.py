"""Measured costs in the cache folder: whatever lies there, and however busy the machine was."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.spec.adaptive import cost as prices
from tokenswift.spec.adaptive.cost import Table
from tokenswift.spec.methods import resources

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
    {**GOOD, "rows": []},
    {**GOOD, "fixed": [1.0]},
    {**GOOD, "token": [0.1, 0.2, 0.3]},
    {**GOOD, "fixed": ["1", "2"]},
    {**GOOD, "rows": [1, 1]},
    {**GOOD, "rows": [2, 3]},
    {**GOOD, "rows": [1, 10**9]},
    {**GOOD, "fixed": [1.0, -2.0]},
    {**GOOD, "fixed": [1.0, 1e300]},
    {**GOOD, "token": [1.0, -2.0]},
    {**GOOD, "level": -1.0},
    {**GOOD, "waited": 1.1},
    {},
    [],
    "costs",
    "{",
    "[" * 100_000,
    '{"rows": [1], "fixed": [NaN], "token": [0.0], "level": 0.0}',
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
    prices.WRITER.submit(int).result()
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
    prices.WRITER.submit(int).result()
    (path,) = (tmp_path / "costs").iterdir()
    kept = json.loads(path.read_text())
    assert kept["fixed"][0] < 1e5 and kept["waited"] < 0.5
    lists = {k: tuple(kept[k]) for k in ("rows", "fixed", "token")}
    assert asdict(llm.resources.costs()) == {**kept, **lists}
    again = LLM.from_model(tiny_model("llama"), heads=None)
    assert again.generate(PROMPT, 150, ignore_eos=True).token_ids == plain
    assert made == [slow]  # by the first run alone
