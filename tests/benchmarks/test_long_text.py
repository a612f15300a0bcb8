"""A long text of a real model, written both ways: rows, and the table of them."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.long_text import LongText, Mark, compare, parse_options, run_llama, wait_while
from benchmarks.words import Measured
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM
from tools import summaries

OPTIONS = argparse.Namespace(
    tokens=50, part=20, seed=1, sampling='{"temperature": 0.9}', pause=None
)


@pytest.fixture
def text() -> LongText:
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    return LongText(llm, llm.prefill("Once upon a time"), OPTIONS)


def test_parts_have_ends_and_the_whole_has_their_tokens(text: LongText) -> None:
    parts = text.parts()
    assert [row["part"] for row in parts] == [20, 40, 50]
    figures = text.figures()
    assert figures["tokens"] == 50
    assert figures["identical"] is True


def test_a_part_is_compared_by_its_own_tokens_and_seconds() -> None:
    auto = (Mark(tokens=10, steps=5, seconds=1.0), Mark(tokens=30, steps=15, seconds=2.0))
    plain = (Mark(tokens=10, steps=10, seconds=2.0), Mark(tokens=30, steps=30, seconds=6.0))
    figures = compare(auto, plain)
    assert figures == {"auto_over_plain": 4.0, "plain": 5.0, "auto": 20.0, "tokens_a_step": 2.0}


def test_no_turn_begins_while_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pause"
    file.touch()
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            file.unlink()

    monkeypatch.setattr(time, "sleep", sleep)
    wait_while(file)
    wait_while(None)
    assert len(waits) == 3


def row_of(**figures: object) -> Measured:
    """A row of a text."""
    speeds = {"plain": 5.0, "auto": 10.0, "auto_over_plain": 2.0, "tokens_a_step": 2.5}
    about = {
        "model": "m",
        "dtype": "int8",
        "machine": "AMD EPYC (AVX512), 2 threads",
        "commit": "c",
        "book": "b",
    }
    return {**about, **speeds, "distinct_4": 0.5, **figures}


def whole_of(tokens: int) -> Measured:
    """A row of all of a text."""
    times = {"auto_seconds": 60.0, "plain_seconds": 120.0}
    return row_of(tokens=tokens, prompt=4, identical=True, litany=None, **times)


def test_the_docs_show_the_newest_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(part=7), whole_of(7), row_of(part=1000), row_of(part=1500), whole_of(1500)]
    file = tmp_path / "long-text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LONG_TEXT", file)
    table = summaries.long_text("m")
    assert [cells[0] for cells in table.body] == ["to 1,000", "to 1,500", "**all 1,500**"]
    assert "in 1.0 minutes instead of 2.0" in table.below


def test_a_text_with_xtc_is_shown_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"xtc_probability": 0.5}
    rows = [whole_of(1500), {**whole_of(1700), "sampling": sampling}]
    file = tmp_path / "long-text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LONG_TEXT", file)
    for xtc, name in ((False, "**all 1,500**"), (True, "**all 1,700**")):
        assert [cells[0] for cells in summaries.long_text("m", xtc=xtc).body] == [name]


def test_programs_are_shown_beside_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our memory is that of the newest run behind as many tokens as the text has. A newer text that
    llama.cpp did not run is left out."""
    texts = tmp_path / "long-text.jsonl"
    memory = tmp_path / "run-memory.jsonl"
    monkeypatch.setattr(summaries, "LONG_TEXT", texts)
    monkeypatch.setattr(summaries, "RUN_MEMORY", memory)
    assert "Not measured yet" in summaries.long_text_programs().below
    total = {
        **whole_of(1500),
        "model": summaries.LONG_TEXT_MODEL,
        "llama": 2.5,
        "llama_seconds": 600.0,
        "llama_peak": 2e9,
    }
    newer = {**whole_of(1700), "model": summaries.LONG_TEXT_MODEL, "auto": 12.0}
    texts.write_text("".join(json.dumps(row) + "\n" for row in (total, newer)))
    runs = [
        {"model": summaries.LONG_TEXT_MODEL, "context": context, "peak": peak}
        for context, peak in ((9000, 4e9), (1600, 3e9), (1000, 1e9))
    ]
    memory.write_text("".join(json.dumps(row) + "\n" for row in runs))
    assert summaries.long_text_programs().body == [
        ["**with drafts**", "1.0", "10.0", "2.00", "4.00", "3.0"],
        ["plain", "2.0", "5.0", "1.00", "2.00", "–"],
        ["llama.cpp", "10.0", "2.5", "0.50", "1.00", "2.0"],
    ]


def test_parts_too_short_to_time_llama_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["long_text", "m", "b.txt", "--part", "99", "--llama", "python"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        parse_options()
    assert "--part is 99; valid with --llama: at least 100" in capsys.readouterr().err


def test_another_program_is_timed_in_the_middle_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that answers with the places that it is asked for."""
    stand_in = tmp_path / "python"
    program = """
    import json, sys
    print(json.dumps("1.0"), flush=True)
    for line in sys.stdin:
        print(json.dumps([place / 10 for place in json.loads(line)["samples"]]), flush=True)"""
    stand_in.write_text(f"#!{sys.executable}\n{textwrap.dedent(program)}\n")
    stand_in.chmod(0o700)
    llama = run_llama(str(stand_in), tmp_path / "m.gguf", [1], list(range(300)), [200, 300])
    assert llama.speeds == [10.0, 25.0]
    assert llama.version == "1.0"
    totals = llama.totals()
    assert totals["llama_seconds"] == 200 / 10 + 100 / 25
    assert totals["llama"] == 300 / 24


def test_the_docs_compare_with_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = {"llama_seconds": 180.0, "llama_peak": 2.5e9, "llama_version": "1.0"}
    rows = [row_of(part=1500, llama=4.0), {**whole_of(1500), "llama": 4.0, **peer}]
    file = tmp_path / "long-text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LONG_TEXT", file)
    table = summaries.long_text("m")
    assert table.head[-2:] == ["llama.cpp, tokens/s", "over llama.cpp"]
    assert [cells[-2:] for cells in table.body] == [["4.0", "**2.50**"]] * 2
    assert "would take it 3.0 minutes; it held 2.5 GB" in table.below


def test_a_text_not_yet_measured_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "LONG_TEXT", tmp_path / "none.jsonl")
    assert "python -m benchmarks.long_text m BOOK" in summaries.long_text("m").below
