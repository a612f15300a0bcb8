"""A real model beside llama.cpp: rows, with a stand-in for llama.cpp, and the tables of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import real
from benchmarks.real import Task
from benchmarks.words import Measured
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM
from tokenswift.types import RunError
from tools import summaries

#: in place of an interpreter that has llama_cpp
PROGRAM = """#!{python}
import json, sys
print(json.dumps("1.2.3 (AVX2)"), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    reading, writing = 2.0 * len(question["prompt"]), 1.0 * len(question["continuation"])
    print(json.dumps({{"reading": reading, "writing": writing}}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[real.Peer]:
    """Reads twice as many tokens a second as the prompt has, and writes as many as follow it."""
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    with real.Peer(str(program), tmp_path / "model.gguf", 1) as peer:
        yield peer


@pytest.fixture
def llm() -> LLM:
    return LLM.from_model(tiny_model("qwen2", max_position_embeddings=1024), chat_tokenizer())


def test_the_model_itself_answers_a_conversations_earlier_questions(llm: LLM) -> None:
    ids = real.prompt_of(llm, Task(("Hello", "And?"), 8))
    text = llm.tokenizer.decode(ids)
    assert re.fullmatch(r"<s>user: Hello\nassistant: .+\nuser: And\?\nassistant:", text, re.DOTALL)


@pytest.fixture
def task_row(llm: LLM, peer: real.Peer, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A row of two texts of 40 tokens."""
    monkeypatch.setitem(real.TASKS, "novel", Task(60, 40))
    return real.measure_task(llm, "novel", peer, 2)


def test_both_ways_write_the_same_tokens(task_row: Measured) -> None:
    assert task_row["identical"] is True


def test_speeds_over_the_peers_are_those_of_the_same_tokens(task_row: Measured) -> None:
    tokens = task_row["tokens"]
    assert isinstance(tokens, int)
    assert 0 < tokens <= 80
    assert task_row["llama"] == tokens / 2
    ratios = task_row["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 2
    over_peer = task_row["plain_over_llama"]
    assert isinstance(over_peer, float)
    assert over_peer > 0


def test_the_docs_show_the_newest_rows_of_a_machine(
    llm: LLM,
    peer: real.Peer,
    task_row: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context_row = real.measure_context(llm, 48, peer, 2)
    assert context_row["context"] == 48
    assert context_row["llama_reading"] == 96
    assert context_row["llama_writing"] == real.NEW
    older_row = {**task_row, "auto": 1.0}
    row_elsewhere = {**task_row, "auto": 2.0, "machine": "other"}
    about = {"model": "m", "dtype": "int8", "machine": "cpu", "commit": "c", "peer": peer.version}
    rows = [{**about, **row} for row in (older_row, task_row, context_row, row_elsewhere)]
    file = tmp_path / "real.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "REAL", file)
    tasks = summaries.real("cpu")
    assert [cells[0] for cells in tasks.body] == ["novel"]
    assert tasks.body[0][3] == f"**{task_row['auto']:.1f}**"
    contexts = summaries.contexts("cpu")
    assert [cells[0] for cells in contexts.body] == ["48"]
    assert "1.2.3 (AVX2)" in contexts.below


def test_a_peer_without_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended with code 1"):
        real.Peer(sys.executable, tmp_path / "model.gguf", 1)
