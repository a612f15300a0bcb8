"""The commands around runs: generate --run-dir, resume, runs, plan; signals, and what is run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, chatty_model, interrupted
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift.runs import folder as folders
from tokenswift.runs.lists import summary_of

LENGTH = ("--max-new-tokens", "60", "--ignore-eos", "--seed", "4")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_signal_and_the_way_on(
    cli: Call,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    word: str,
) -> None:
    """The step is finished and run, the line says how to go on, and going on gives the whole
    text."""
    argv = ("generate", "hello", "--model", tiny, *LENGTH)
    uninterrupted = cli(*argv, "--json", "uninterrupted", "--quiet")
    with monkeypatch.context() as patch:
        interrupted(patch, 23, number)
        done = cli(*argv, "--run-dir", "run", "--quiet")
    assert done.code == code
    run = summary_of(tmp_path / "cwd" / "run")
    assert "tokens" in run
    assert run["state"] == "interrupted"
    assert run["tokens"] >= 23
    line = f"{word}; {run['tokens']} tokens were written, the text so far is on standard output"
    assert done.error == f"{line}; continue with: tokenswift resume run"
    on = cli("resume", "run", "--json", "again", "--quiet")
    assert on.code == 0
    assert on.err == ""
    records = [
        json.loads((tmp_path / "cwd" / name).read_text()) for name in ("uninterrupted", "again")
    ]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert records[0]["text"] == records[1]["text"]
    assert done.out.rstrip("\n") + on.out.rstrip("\n") == uninterrupted.out.rstrip("\n")
    assert (tmp_path / "cwd/run/text.txt").read_bytes().decode() == records[0]["text"]
    assert on.files == ["again", "journal", "lock", "run", "text.txt", "uninterrupted"]


def test_generate_goes_on_with_its_own_run(
    cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again continues; its output file holds the whole text; another seed is
    refused."""
    argv = ("generate", "hello", "--model", tiny, *LENGTH, "--quiet")
    text = cli(*argv).out
    with monkeypatch.context() as patch:
        interrupted(patch, 30)
        assert cli(*argv, "--run-dir", "run").code == 130
    done = cli(*argv, "--run-dir", "run", "--output", "t")
    assert done.code == 0
    assert done.out
    assert text.endswith(done.out)
    assert (tmp_path / "cwd" / "t").read_bytes().decode().rstrip("\n") == text.rstrip("\n")
    other = cli(*argv[:-2], "5", "--quiet", "--run-dir", "run")
    assert other.error.startswith("--run-dir run holds")
    assert "seed is 5, was 4" in other.error
    again = cli(*argv, "--run-dir", "run", "--output", "t")
    assert again.code == 0
    assert again.out == ""  # nothing left to do
    assert (tmp_path / "cwd" / "t").read_bytes().decode().rstrip("\n") == text.rstrip("\n")
    assert cli("resume", "run", "--quiet").out == ""
    longer = cli("resume", "run", "--max-new-tokens", "90", "--quiet")
    assert longer.code == 0
    assert summary_of(tmp_path / "cwd/run").get("tokens") == 90


SLOW = """
import sys, time
from tokenswift.cli.main import main
from tokenswift.engine.stream import Stream
real, steps = Stream.__next__, []
def slow(self):
    if steps:
        sys.stderr.write("step\\n"); sys.stderr.flush()
        if len(steps) == 3:
            time.sleep({pause})
    steps.append(real(self))
    return steps[-1]
Stream.__next__ = slow
sys.exit(main(sys.argv[1:]))
"""


def begun(
    argv: list[str], pause: float, stdout: int, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, in the third step, which takes ``pause``
    seconds."""
    code = [sys.executable, "-c", SLOW.format(pause=pause), *argv, "--strategy", "autoregressive"]
    process = subprocess.Popen(code, stderr=subprocess.PIPE, stdout=stdout, stdin=stdin)
    assert process.stderr is not None
    for _ in range(3):
        assert process.stderr.readline() == b"step\n"
    return process


def test_the_second_interrupt_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    """In the middle of a step that would go on for ten minutes; the journal is valid."""
    argv = [
        "generate",
        "hello",
        "--model",
        str(tiny),
        *LENGTH,
        "--run-dir",
        str(tmp_path / "run"),
        "--quiet",
    ]
    with begun(argv, 600, stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # the step is not broken off
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    contents, state = folders.load(tmp_path / "run")
    assert not contents.damaged
    assert len(state.tokens) == 3


def test_a_list_and_the_text(cli: Call, tiny: Path, tmp_path: Path) -> None:
    cli("generate", "hello", "--model", tiny, *LENGTH, "--run-dir", "run", "--quiet")
    shown = cli("runs")
    assert shown.out.startswith("run ")
    assert shown.out.splitlines()[-1].startswith("run   finished (length) ")
    assert json.loads(cli("runs", "run", "--json", "-").out)["tokens"] == 60
    text = cli("runs", "run", "--text")
    assert text.out == (tmp_path / "cwd/run/text.txt").read_bytes().decode()
    (tmp_path / "cwd/empty").mkdir()
    assert "holds no run" in cli("runs", "empty", "--text").error


def test_a_finished_run_says_so_and_nothing_is_written(cli: Call, tiny: Path) -> None:
    """Without the model's being loaded; more tokens make it longer."""
    argv = ("--continue", "--ignore-eos", "--quiet")
    cli("generate", "hello", "--model", tiny, "-n", 8, "--run-dir", "r", *argv)
    before = {path: path.read_bytes() for path in Path("r").iterdir()}
    done = cli("resume", "r")
    words = "stopped at its maximum length; --max-new-tokens sets another"
    line = f"r is finished (8 tokens, {words}); tokenswift runs r --text prints it\n"
    assert (done.code, done.out, done.err) == (0, "", line)
    assert cli("resume", "r", "-n", 8).err == line
    assert {path: path.read_bytes() for path in Path("r").iterdir()} == before
    less = cli("resume", "r", "-n", 7)
    assert less.code == 2
    assert (
        less.error == "--max-new-tokens is 7; the run has 8 tokens already; valid: at least as many"
    )
    longer = cli("resume", "r", "-n", 9, "--json")
    assert longer.code == 0
    assert len(json.loads(longer.out)["token_ids"]) == 9
    assert len(json.loads(cli("resume", "r", "--json").out)["token_ids"]) == 9


def test_a_finished_run_without_its_text_gets_it(cli: Call, tiny: Path) -> None:
    argv = ("--continue", "--ignore-eos", "--quiet")
    cli("generate", "hello", "--model", tiny, "-n", 8, "--run-dir", "r", *argv)
    text = Path("r/text.txt").read_bytes()
    Path("r/text.txt").unlink()
    assert cli("resume", "r", "--quiet").code == 0
    assert Path("r/text.txt").read_bytes() == text


def test_a_record_of_a_resumed_run_never_replaces_its_model(
    cli: Call, tiny: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny, tmp_path / "model")
    argv = ("--continue", "--ignore-eos", "--quiet")
    cli("generate", "hello", "--model", copy, "-n", 8, "--run-dir", "r", *argv)
    config = (copy / "config.json").read_bytes()
    done = cli("resume", "r", "-n", 9, "--json", copy / "config.json")
    assert done.code == 2
    assert "is a file of the run's model" in done.error
    assert (copy / "config.json").read_bytes() == config


# ---- a text of the length that was asked for -----------------------------------------------------


@pytest.fixture
def ending(tmp_path: Path) -> Path:
    """A tiny model that ends every text soon: half of its tokens are end marks."""
    folder = tmp_path / "ending"
    model = tiny_model(max_position_embeddings=2048)
    model.generation_config.eos_token_id = list(range(0, 256, 2))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


CONTINUED = ("generate", "hello", "--continue", "--json", "j")


def record(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, object] = json.loads((tmp_path / "cwd" / "j").read_text())
    return content


def test_a_long_text_that_is_continued_has_the_length_that_was_asked_for(
    cli: Call, ending: Path, tmp_path: Path
) -> None:
    done = cli(*CONTINUED, "-m", ending, "-n", 1000)
    assert len(record(tmp_path)["token_ids"]) == 1000
    assert "the model cannot end it before token 1000 (--min-tokens)" in done.err


@pytest.mark.parametrize(
    "options", [("-n", 900), ("-n", 1000, "--min-tokens", 0), ("-n", 1000, "--stop", "never")]
)
def test_a_short_one_or_one_that_may_end_ends_where_the_model_ends_it(
    cli: Call, ending: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    cli(*CONTINUED, "-m", ending, *options)
    assert record(tmp_path)["finish_reason"] == "eos"


def test_an_early_end_says_what_to_do(cli: Call, ending: Path) -> None:
    done = cli(*CONTINUED, "-m", ending, "-n", 300, "--run-dir", "run")
    line = done.err.splitlines()[-1]
    assert re.match(
        r"the model ended the text at \d+ of 300 tokens; --min-tokens 300 prevents", line
    )
    assert "--ignore-eos continues after its end mark" in line
    assert line.endswith("; continue with: tokenswift resume run --min-tokens 300")


def test_the_command_of_that_line_goes_on_with_the_run(
    cli: Call, ending: Path, tmp_path: Path
) -> None:
    cli(*CONTINUED, "-m", ending, "-n", 300, "--run-dir", "run")
    early = record(tmp_path)["token_ids"]
    done = cli("resume", "run", "--min-tokens", 300, "--json", "j")
    assert done.code == 0
    assert record(tmp_path)["token_ids"][: len(early) - 1] == early[:-1]
    assert len(record(tmp_path)["token_ids"]) == 300


def test_a_finished_run_says_how_to_go_on(cli: Call, ending: Path) -> None:
    cli(*CONTINUED, "-m", ending, "-n", 300, "--run-dir", "run")
    done = cli("resume", "run")
    assert done.err.rstrip().endswith("tokenswift resume run --min-tokens N continues it")


def test_an_earlier_run_that_may_end_is_not_changed_by_the_same_command(
    cli: Call, ending: Path, tmp_path: Path
) -> None:
    cli(*CONTINUED, "-m", ending, "-n", 1200, "--min-tokens", 0, "--run-dir", "run")
    early = record(tmp_path)["token_ids"]
    done = cli(*CONTINUED, "-m", ending, "-n", 1200, "--run-dir", "run")
    assert done.code == 0
    assert record(tmp_path)["token_ids"] == early


def test_the_same_command_with_a_greater_length_makes_a_long_text_longer(
    cli: Call, ending: Path, tmp_path: Path
) -> None:
    cli(*CONTINUED, "-m", ending, "-n", 1000, "--run-dir", "run")
    cli(*CONTINUED, "-m", ending, "-n", 1100, "--run-dir", "run")
    assert len(record(tmp_path)["token_ids"]) == 1100


def test_an_answer_of_usual_length_ends_without_advice(cli: Call, tmp_path: Path) -> None:
    model = chatty_model(tmp_path / "chatty", 2048)
    done = cli("generate", "hello", "-m", model, "-n", 300)
    assert "--min-tokens" not in done.err


@pytest.mark.parametrize("option", ["--min-tokens N", "--ignore-eos"])
def test_the_help_of_generate_shows_what_keeps_a_text_from_ending(cli: Call, option: str) -> None:
    assert option in cli("generate", "--help").out
