"""The commands around runs: generate --run-dir, resume, runs, plan, report; signals, and what is kept."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.engine.stream import Stream
from tokenswift.runs import folder as folders
from tokenswift.runs.listing import summary_of
from tokenswift.types import Step

LENGTH = ("--max-new-tokens", "60", "--ignore-eos", "--seed", "4")


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, number: int = signal.SIGINT) -> None:
    """A signal comes in the middle of the step that makes a token's number reach ``after``."""
    real, made = Stream.__next__, [0]

    def step_and_signal(self: Stream) -> Step:
        step, before = real(self), made[0]
        made[0] += len(step.token_ids)
        if before < after <= made[0]:
            os.kill(os.getpid(), number)
        return step

    monkeypatch.setattr(Stream, "__next__", step_and_signal)


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_signal_and_the_way_on(
    cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, word: str
) -> None:
    """The step is finished and kept, the line says how to go on, and going on gives the whole text."""
    argv = ("generate", "hello", "--model", tiny, *LENGTH)
    whole = cli(*argv, "--json", "whole", "--quiet")
    with monkeypatch.context() as patch:
        interrupted(patch, 23, number)
        done = cli(*argv, "--run-dir", "run", "--quiet")
    assert done.code == code
    kept = summary_of(tmp_path / "cwd" / "run")
    assert kept["state"] == "interrupted" and kept["tokens"] >= 23
    line = f"{word}; {kept['tokens']} tokens were written, the text so far is on standard output"
    assert done.error == f"{line}; continue with: tokenswift resume run"
    on = cli("resume", "run", "--json", "again", "--quiet")
    assert on.code == 0 and on.err == ""
    records = [json.loads((tmp_path / "cwd" / name).read_text()) for name in ("whole", "again")]
    assert records[0]["token_ids"] == records[1]["token_ids"] and records[0]["text"] == records[1]["text"]
    assert done.out.rstrip("\n") + on.out.rstrip("\n") == whole.out.rstrip("\n")
    assert (tmp_path / "cwd/run/text.txt").read_bytes().decode() == records[0]["text"]
    assert on.files == ["again", "journal", "lock", "run", "text.txt", "whole"]


def test_generate_goes_on_with_its_own_run(
    cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again continues; its output file holds the whole text; another seed is refused."""
    argv = ("generate", "hello", "--model", tiny, *LENGTH, "--quiet")
    whole = cli(*argv).out
    with monkeypatch.context() as patch:
        interrupted(patch, 30)
        assert cli(*argv, "--run-dir", "run").code == 130
    done = cli(*argv, "--run-dir", "run", "--output", "t")
    assert done.code == 0 and done.out and whole.endswith(done.out)
    assert (tmp_path / "cwd" / "t").read_bytes().decode().rstrip("\n") == whole.rstrip("\n")
    other = cli(*argv[:-2], "5", "--quiet", "--run-dir", "run")
    assert (
        other.code == 2
        and "seed is 5, was 4" in other.error
        and other.error.startswith("--run-dir run holds")
    )
    again = cli(*argv, "--run-dir", "run", "--output", "t")
    assert again.code == 0 and again.out == ""  # nothing left to do
    assert (tmp_path / "cwd" / "t").read_bytes().decode().rstrip("\n") == whole.rstrip("\n")
    longer = cli("resume", "run", "--max-new-tokens", "90", "--quiet")
    assert longer.code == 0 and summary_of(tmp_path / "cwd/run")["tokens"] == 90


def test_before_the_first_step_a_signal_raises_at_once_and_the_second_leaves() -> None:
    left: list[int] = []
    with Signals(left.append) as signals:
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert caught.value.code == 143
        signals._take(signal.SIGINT, None)
        assert left == [130]
    with Signals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGINT)  # does not raise in the middle of a step
        with pytest.raises(Interrupted):
            signals.check()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.check()
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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


def begun(argv: list[str], pause: float, stdout: int, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, in the third step, which takes ``pause`` seconds."""
    code = [sys.executable, "-c", SLOW.format(pause=pause), *argv, "--strategy", "autoregressive"]
    process = subprocess.Popen(code, stderr=subprocess.PIPE, stdout=stdout, stdin=stdin)
    assert process.stderr is not None
    for _ in range(3):
        assert process.stderr.readline() == b"step\n"
    return process


def test_the_second_interrupt_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    """In the middle of a step that would go on for ten minutes; the journal is valid."""
    argv = ["generate", "hello", "--model", str(tiny), *LENGTH, "--run-dir", str(tmp_path / "run"), "--quiet"]
    with begun(argv, 600, stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # the step is not broken off
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    contents, state = folders.load(tmp_path / "run")
    assert not contents.damaged and len(state.tokens) == 3


@pytest.mark.slow
def test_a_terminal_that_is_closed(tiny: Path, tmp_path: Path) -> None:
    """Text and errors go to a terminal that disappears: exit code 129, and everything is kept."""
    leader, follower = pty.openpty()
    argv = ["generate", "hello", "--model", str(tiny), *LENGTH, "--run-dir", str(tmp_path / "run"), "--quiet"]
    with begun(argv, 1.0, stdout=follower, stdin=follower) as process:
        os.close(follower)
        process.send_signal(signal.SIGHUP)
        os.close(leader)
        assert process.wait(timeout=60) == 129
    assert not folders.load(tmp_path / "run")[0].damaged and summary_of(tmp_path / "run")["tokens"] >= 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory; "),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory; ",
        ),
        (RuntimeError("boom"), "the run failed (RuntimeError: boom)"),
    ],
)
def test_out_of_memory(
    cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """One clear line, exit code 1, the journal is whole and the run can go on."""
    real, left = LLM.start, [12]

    def start(self: LLM, request: Request) -> Stream:
        forward = self.target.forward

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise error
            return forward(*args)

        self.target.forward = failing  # type: ignore[method-assign]
        return real(self, request)

    plain = ("--strategy", "autoregressive")  # a pass a token, however busy the machine is
    argv = ("generate", "hello", "--model", tiny, *LENGTH, *plain, "--run-dir", "run", "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "start", start)
        done = cli(*argv)
    assert done.code == 1 and done.error.startswith(words)
    assert done.error.endswith("the text so far is on standard output; continue with: tokenswift resume run")
    kept = summary_of(tmp_path / "cwd" / "run")
    assert kept["state"] == "interrupted" and kept["tokens"] >= 11
    assert cli("resume", "run", "--quiet").code == 0


def test_a_finished_run_has_nothing_to_resume(cli: Call, tiny: Path) -> None:
    """It is said without the model's being loaded; more tokens make it longer."""
    cli("generate", "hello", "--model", tiny, "-n", "8", "--ignore-eos", "--run-dir", "r", "--quiet")
    done = cli("resume", "r")
    assert done.code == 0 and done.out == ""
    assert done.err == (
        "r is finished (8 tokens, ended at the length asked for): tokenswift text r prints it; "
        "--max-new-tokens makes it longer\n"
    )
    assert cli("resume", "r", "-n", "8").err == done.err
    longer = cli("resume", "r", "-n", "9", "--json")
    assert longer.code == 0 and len(json.loads(longer.out)["token_ids"]) == 9
    assert len(json.loads(cli("resume", "r", "--json").out)["token_ids"]) == 9


def test_runs(cli: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished, interrupted, running, damaged and unreadable ones, and what is no run."""
    assert cli("runs").out == "no runs in .\n"
    argv = ("generate", "hello", "--model", tiny, *LENGTH, "--quiet")
    cwd = tmp_path / "cwd"
    cli(*argv, "--run-dir", "done")
    with monkeypatch.context() as patch:
        interrupted(patch, 30)
        cli(*argv, "--run-dir", "cut")
    (cwd / "other").mkdir()
    (cwd / "strange").mkdir()
    (cwd / "strange" / "journal").write_text("hello")
    (cwd / "bad").mkdir()
    data = bytearray((cwd / "done" / "journal").read_bytes())
    data[-9] ^= 1
    (cwd / "bad" / "journal").write_bytes(data)
    lock = folders.Lock(cwd / "cut")
    shown = cli("runs").out
    lock.release()
    rows = {line.split("  ")[0]: line for line in shown.splitlines()[2:]}
    assert list(rows) == ["bad", "cut", "done", "strange"]
    assert re.search(r"finished \(length\) +60 +60 ", rows["done"]) and "running" in rows["cut"]
    assert (
        "damaged at byte" in rows["bad"] and "unreadable: strange/journal is not a journal" in rows["strange"]
    )
    assert "interrupted" in cli("runs", "cut").out
    record = json.loads(cli("runs", "done", "--json").out)
    assert record["tokens"] == 60 and record["finished"] and record["dtype"] == "float32"
    assert cli("runs", "nowhere").error == "folder is 'nowhere': no such folder; valid: one with runs in it"


def test_report(cli: Call, tiny: Path, tmp_path: Path) -> None:
    cli("generate", "hello", "--model", tiny, *LENGTH, "--run-dir", "run", "--quiet")
    done = cli("report", "run")
    assert done.code == 0 and done.out == "" and "60 tokens" in done.err
    page = (tmp_path / "cwd/run/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Run run: 60 tokens, finished (length)" in page
    assert "1; never resumed" in page
    assert cli("resume", "run", "--max-new-tokens", "61", "--quiet").code == 0
    assert cli("report", "run", "--quiet").code == 0
    assert "2; resumed at token 60" in (tmp_path / "cwd/run/report.html").read_text(encoding="utf-8")
    assert cli("report", "run", "--output", "page.html", "--quiet").err == ""
    assert (tmp_path / "cwd/page.html").exists()
    (tmp_path / "cwd/empty").mkdir()
    assert "holds no run" in cli("report", "empty").error


def test_one_report_of_many_runs(cli: Call, tiny: Path, tmp_path: Path) -> None:
    """Of a folder with runs in it, and of an address, which has nowhere to put a page."""
    for name, length in (("first", 30), ("second", 40)):
        argv = (
            "--model",
            tiny,
            "--ignore-eos",
            "--max-new-tokens",
            length,
            "--run-dir",
            f"out/{name}",
            "--quiet",
        )
        cli("generate", "hello", *argv)
    done = cli("report", "out")
    assert (done.code, done.err) == (0, "out/report.html, 2 runs\n")
    page = (tmp_path / "cwd/out/report.html").read_text(encoding="utf-8")
    assert "Runs in out: 2 of 2 finished, 70 tokens" in page and ">first</th>" in page
    there = f"file://{tmp_path}/cwd/out"
    shown = cli("runs", there)
    assert shown.out.count(f"{there}/") == 2 and shown.out.count("finished (length)") == 2
    assert cli("report", there).error.startswith("--output is not given, and file://")
    assert cli("report", there, "--output", "page.html").code == 0
    assert (tmp_path / "cwd/page.html").read_text(encoding="utf-8").replace(there, "out") == page
    assert "no such folder" in cli("runs", "missing").error


def test_a_plan_of_many_prompts(cli: Call, tiny: Path) -> None:
    Path("p").write_text(
        '{"prompt": "hello"}\n{"prompt": "hello there", "max_new_tokens": 50}\n' * 2, "utf-8"
    )
    how = ("--prompts", "p", "--model", tiny, "--quiet", "--max-new-tokens", "100")
    shown = cli("plan", *how, "--nodes", "2")
    assert shown.code == 0 and shown.err == "", shown
    for word in (
        "4 texts, 32 tokens of prompts, 300 new tokens; 2 nodes, 2 concurrent sequences on each",
        "node hours",
    ):
        assert word in shown.out
    record = json.loads(cli("plan", *how, "--at-once", "3", "--json", "--no-measure").out)
    assert (record["at_once"], record["nodes"], record["seconds"]) == (3, 1, None)
    assert record["peak"] == sum(part["nbytes"] for part in record["parts"])
    assert cli("plan", "hi", "--nodes", "2").error == "--nodes is given without --prompts; valid: both"
    assert cli("plan", "hi", "--prompts", "p").error.startswith("--prompts and PROMPT given")
    too_long = cli("plan", *how, "--max-new-tokens", "1000")
    assert too_long.code == 2 and "valid: up to the model's 256 positions" in too_long.error


def test_plan(cli: Call, tiny: Path) -> None:
    shown = cli("plan", "hello", "--model", tiny, "--quiet", "--max-new-tokens", "100")
    assert shown.code == 0 and shown.err == "" and shown.files == []
    for word in (
        "weights",
        "full cache",
        "expected peak",
        "expected time",
        "5 tokens of prompt, 100 new tokens",
    ):
        assert word in shown.out
    record = json.loads(cli("plan", "hello", "--model", tiny, "--quiet", "--json", "--no-measure").out)
    assert record["seconds"] is None and record["peak"] == sum(part["nbytes"] for part in record["parts"])
    shown = cli("plan", "hello", "--model", tiny, "--quiet", "--no-measure")
    assert "expected peak" in shown.out and "expected time" not in shown.out
    refused = cli("plan", "hello", "--model", tiny, "--quiet", "--max-new-tokens", "1000")
    assert refused.code == 2 and "valid: up to the model's 256 positions" in refused.error


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("resume", "none"), "run_dir none holds no run; valid: a folder made with --run-dir"),
        (
            ("resume", "none", "--max-new-tokens", "0"),
            "--max-new-tokens is 0; valid: an integer of at least 1",
        ),
        (("generate", "x", "--on-loop", "halt"), "--on-loop is 'halt'; valid: report, stop"),
        (("generate", "x", "--run-dir", ""), "--run-dir is ''"),
        (
            ("generate", "x", "--loop-patterns", "3,2"),
            "--loop-patterns is 3,2; valid: three integers MIN,MAX,COUNT",
        ),
        (("generate", "x", "--loop-patterns", "3,2,2"), "max_pattern_size is 2; valid: 3 (min_pattern_size)"),
    ],
)
def test_bad_input(cli: Call, argv: tuple[str, ...], line: str) -> None:
    done = cli(*argv)
    assert done.code == 2 and line in done.error and done.files == []
