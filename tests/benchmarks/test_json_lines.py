"""Processes that answer lines of JSON, and rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.json_lines import PEERS, LineProcess, publish
from tokenswift.types import RunError

ECHO = """
import sys
for line in sys.stdin:
    if line.strip() == '"end"':
        sys.exit(3)
    print(line, end="", flush=True)
"""


def echo() -> LineProcess:
    return LineProcess("the echo", [sys.executable, "-c", ECHO])


def test_each_question_has_its_answer() -> None:
    with echo() as process:
        assert process.ask([1, 2], list[int]) == [1, 2]
        assert process.ask("a\nb", str) == "a\nb"


def test_an_answer_of_another_kind_is_refused_by_name() -> None:
    with echo() as process, pytest.raises(RunError, match="the echo answers '\"five\"': Expected"):
        process.ask("five", int)


def test_the_end_of_a_process_is_told_with_its_code() -> None:
    with echo() as process, pytest.raises(RunError, match="the echo ended with code 3"):
        process.ask("end", str)


def test_a_row_is_printed_and_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    publish({"a": 1}, file)
    publish({"a": 2}, file)
    publish({"a": 3}, None)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"a": 1}, {"a": 2}]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"a": 1},
        {"a": 2},
        {"a": 3},
    ]


@pytest.mark.parametrize("program", sorted(PEERS.glob("*.py")), ids=lambda file: file.stem)
def test_a_peer_imports_nothing_of_the_benchmarks(program: Path) -> None:
    """Its interpreter may lack them, and its path leads to another checkout."""
    assert "benchmarks import" not in program.read_text(encoding="utf-8")
    assert "import benchmarks" not in program.read_text(encoding="utf-8")
