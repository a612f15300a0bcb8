"""Programs beside one another by length of the context: rows of stand-ins for them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import lengths
from benchmarks.lengths import Program, Speed, Trial
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM
from tokenswift.types import InputError, RunError
from tools import summaries

#: in place of a program: reads as many tokens a second as the prompt has, and says its options
PROGRAM = """#!{python}
import json, sys
print(json.dumps(" ".join(sys.argv[4:])), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    answer = {{"reading": len(question["prompt"]), "writing": question["new_tokens"]}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """An interpreter that has any program."""
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


def test_a_programs_process_says_its_speed_and_memory(stand_in: str, tmp_path: Path) -> None:
    program = Program("p", stand_in, "llama_speed.py", ("q8_0",))
    trial = program.run(tmp_path / "m.gguf", {"prompt": [1, 2, 3], "new_tokens": 7})
    assert trial.speed == Speed(3, 7)
    assert trial.version == "q8_0"
    assert trial.peak > 1 << 20


def test_a_program_that_is_not_installed(tmp_path: Path) -> None:
    program = Program("ik_llama.cpp", sys.executable, "ik_speed.py")
    with pytest.raises(RunError, match="ik_llama.cpp ended with code 1"):
        program.run(tmp_path / "m.gguf", {})


def test_a_programs_trials_are_kept_when_a_later_program_fails(
    stand_in: str, tmp_path: Path
) -> None:
    first = Program("first", stand_in, "llama_speed.py")
    last = Program("last", sys.executable, "ik_speed.py")
    question: dict[str, object] = {"prompt": [1, 2, 3], "new_tokens": 7}
    trials = lengths.in_turns([first, last], 1, tmp_path / "m.gguf", question)
    name, (trial,) = next(trials)
    assert (name, trial.speed) == ("first", Speed(3, 7))
    with pytest.raises(RunError, match="last ended with code 1"):
        next(trials)


def test_a_program_has_a_trial_for_each_round(stand_in: str, tmp_path: Path) -> None:
    both = [Program(name, stand_in, "llama_speed.py") for name in ("a", "b")]
    question: dict[str, object] = {"prompt": [1], "new_tokens": 7}
    trials = list(lengths.in_turns(both, 2, tmp_path / "m.gguf", question))
    assert [(name, len(of_program)) for name, of_program in trials] == [("b", 2), ("a", 2)]


def test_programs_are_those_whose_interpreters_are_named() -> None:
    options = argparse.Namespace(llama="a", keys=lengths.KEYS, ik=None, mistral="b")
    names = [program.name for program in lengths.programs(options)]
    assert names == ["tokenswift", "llama.cpp", "llama.cpp, q8_0 keys", "mistral.rs"]


def test_llama_cpp_runs_with_the_types_of_keys_that_are_named() -> None:
    options = argparse.Namespace(llama="a", keys=["q8_0"], ik=None, mistral=None)
    _, peer = lengths.programs(options)
    assert peer.name == "llama.cpp, q8_0 keys"
    assert peer.options == ("q8_0",)


def test_a_rows_figures_are_medians_and_its_memory_the_most() -> None:
    speeds = [Speed(1.0, 10.0, 5.0), Speed(2.0, 30.0, 7.0), Speed(9.0, 20.0, 6.0)]
    trials = [Trial(speed, 1.0, int(speed.reading), "v") for speed in speeds]
    row = lengths.figures(64, trials)
    assert (row["reading"], row["writing"], row["drafting"]) == (2.0, 20.0, 6.0)
    assert row["peak"] == 9


def test_all_programs_are_asked_the_same_tokens(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night, and nobody saw the lamp. " * 20)
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    (question,) = lengths.questions(llm, book, [30], 8)
    ids = llm.encode(book.read_text())
    assert question["prompt"] == ids[:30]
    assert question["continuation"] == ids[30:38]
    assert question["text"] == llm.tokenizer.decode(ids[:30])


def test_a_book_that_is_too_short(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night.")
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    with pytest.raises(InputError, match="valid: at least 1032"):
        lengths.questions(llm, book, [1024], 8)


def test_the_docs_show_the_newest_row_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"model": "m", "machine": "cpu", "commit": "c", "program": "p"}
    rows = [
        {**about, **lengths.figures(64, [Trial(Speed(writing, writing), 1.0, 10**9, "1.2 (AVX)")])}
        for writing in (5.0, 7.0)
    ]
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LENGTHS", file)
    table = summaries.lengths()
    assert table.body == [["cpu", "64", "p 1.2", "7", "7.0", "", "1.0", "1.0"]]
    monkeypatch.setattr(summaries, "LENGTHS", tmp_path / "none.jsonl")
    assert "Not measured yet" in summaries.lengths().below


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ("AMD EPYC (AVX512), 2 threads", "EPYC"),
        ("AMD EPYC family 25 model 17 (AVX512), 2 threads", "EPYC"),
        ("AMD EPYC family 26 model 2 (AVX512), 2 threads", "EPYC, Zen 5"),
        ("AMD EPYC (AVX2 without bfloat16 products), 2 threads", "EPYC, AVX2"),
        ("Intel(R) Xeon(R) Processor (AVX512), 2 threads", "Xeon"),
    ],
)
def test_processors_with_other_instructions_are_told_apart(machine: str, kind: str) -> None:
    assert summaries.processor({"machine": machine}) == kind
