"""Standard output that is full or closed; progress and text that go to one place."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import on_a_terminal
from tokenswift.cli.output import TextSink
from tokenswift.cli.progress import Progress, mode_of

LENGTH = "--max-new-tokens 40 --raw --ignore-eos --device cpu"
#: ``tokenswift`` whose progress lines are all old enough to be shown
DRIVER = (
    "import sys; from tokenswift.cli import progress; progress.PAUSES.update(plain=0, live=0, title=0); "
    "from tokenswift.cli.main import main; sys.exit(main())"
)

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def shell(command: str, program: str = "-m tokenswift") -> subprocess.CompletedProcess[str]:
    command = command.replace("tokenswift", f"{sys.executable} {program}", 1)
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)


FULL = "failed (No space left on device)"


def some(*cases: object, fast: int) -> list[object]:
    """The first cases, and the others for the slow suite: each is a process of its own."""
    slow = [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
    return [*cases[:fast], *slow[fast:]]


@needs_full
@pytest.mark.parametrize(
    ("more", "words"),
    some(
        ("> /dev/full", f"writing standard output {FULL}; 0 tokens were written, what fitted of the text is"),
        ("--json - > /dev/full", f"writing standard output {FULL}"),
        ("--output /dev/full", f"writing /dev/full {FULL}; what fitted in it was kept"),
        ("--json /dev/full", f"writing /dev/full {FULL}; what was there before was kept"),
        ("--explain /dev/full", f"writing the explanation /dev/full {FULL}; "),
        fast=1,
    ),
)
def test_what_could_not_be_written_is_named(tiny: Path, more: str, words: str) -> None:
    done = shell(f"tokenswift generate hello --model {tiny} {LENGTH} --quiet {more}")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {words}"), done
    assert done.stderr.count("\n") == 1


@needs_full
@pytest.mark.parametrize("command", some("--version", "--help", "generate --help", fast=2))
def test_a_full_standard_output(command: str) -> None:
    done = shell(f"tokenswift {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, f"error: writing standard output {FULL}\n")


@pytest.mark.parametrize(
    "command", some("generate hi", "runs .", "chat", "demo", "plan hi", "--version", fast=2)
)
def test_a_closed_standard_output(command: str) -> None:
    done = shell(f"tokenswift {command} >&- </dev/null")
    assert done.returncode == 1 and done.stderr.startswith("error: standard output "), done
    assert done.stderr.count("\n") == 1 and "closed" in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_after_a_full_standard_output(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = shell(f"tokenswift generate hello --model {tiny} {LENGTH} --quiet --run-dir {run} > /dev/full")
    assert done.returncode == 1 and done.stderr.endswith(f"; continue with: tokenswift resume {run}\n"), done
    assert shell(f"tokenswift resume {run} --quiet").returncode == 0


# ---- one place --------------------------------------------------------------------------------------------


def test_progress_does_not_glue_to_the_text(tiny: Path, tmp_path: Path) -> None:
    command = f"tokenswift generate hello --model {tiny} {LENGTH} --output {tmp_path / 't'}"
    both = shell(f"{command} 2>&1 | cat", f'-c "{DRIVER}"').stdout
    text = (tmp_path / "t").read_bytes().decode()
    begin, shown, end = both.partition(text)
    assert shown and begin.endswith("\n"), both
    assert end.removeprefix("\n").startswith("40 tokens in ") and end.count("\n") == 2 - text.endswith("\n")
    apart = shell(command, f'-c "{DRIVER}"')
    under_way = re.search(r"^(?!40)\d+ of 40 tokens, ", apart.stderr, re.MULTILINE)  # steps differ in length
    assert under_way and apart.stdout.removesuffix("\n") == text.removesuffix("\n")


def test_one_terminal_for_both(tiny: Path, tmp_path: Path) -> None:
    argv = ["generate", "hello", "--model", str(tiny), *LENGTH.split(), "--output", str(tmp_path / "t")]
    done = on_a_terminal(*argv, "--raw-output", term="dumb", program=("-c", DRIVER))
    text = (tmp_path / "t").read_bytes()
    begin, shown, end = done.screen.partition(text)
    assert done.code == 0 and shown and begin.endswith(b"\n"), done
    assert end.removeprefix(b"\n").startswith(b"40 tokens in ")


def test_the_mode_by_places(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as one, (tmp_path / "b").open("w") as other:
        with os.fdopen(os.dup(one.fileno()), "w") as same:
            assert mode_of(one, same) == "none"
        assert mode_of(one, other) == "plain"


def test_a_log_line_in_the_middle_of_the_text_begins_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("tokenswift")
    filters = list(logger.filters)
    file = (tmp_path / "both").open("w", encoding="utf-8", buffering=1)
    out = io.TextIOWrapper(os.fdopen(os.dup(file.fileno()), "wb", buffering=0), encoding="utf-8")
    handler = logging.StreamHandler(file)
    logger.addHandler(handler)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", file)
        sink = TextSink(None)
        sink.write("Once upon")
        logger.error("a draft was dropped")
        sink.write(" a time\n")
        logger.error("again")
        sink.close()
        progress = Progress(9)
    logger.removeHandler(handler)
    assert logger.filters == filters and progress.steps == 0
    out.close()
    file.close()
    assert (tmp_path / "both").read_text() == "Once upon\na draft was dropped\n a time\nagain\n"
