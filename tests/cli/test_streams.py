"""Standard output that is full or closed; progress and text that go to one place."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenswift.cli.output import TextSink
from tokenswift.cli.progress import Progress

LENGTH = "--max-new-tokens 40 --raw --ignore-eos --device cpu"

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


# ---- one place --------------------------------------------------------------------------------------------


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
