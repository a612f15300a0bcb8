"""What a terminal, a pipe and a full disk get: control characters, progress, failed writes, log
lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Outcome, Terminal, chatty_model, on_a_terminal
from tokenswift.cli.terminal import COMMANDING, on_one_line, visible

LENGTH = ("--max-new-tokens", "120", "--ignore-eos", "--seed", "3")
NASTY = {
    "\x1b]0;title\x07": "\\u001b]0;title\\u0007",  # OSC: the window's title
    "\x1b[2J\x1b[31m": "\\u001b[2J\\u001b[31m",  # CSI
    "\x9b2J\x9d0;t\x9c": "\\u009b2J\\u009d0;t\\u009c",  # the same as C1
    "\x1bP$q\x1b\\": "\\u001bP$q\\u001b\\",  # DCS
    "over\rwritten\x08\x7f": "over\\rwritten\\b\\u007f",
    "\u202egnp.exe\u202c \u2066x\u2069": "\\u202egnp.exe\\u202c \\u2066x\\u2069",
    "a\u2028b\U000e0041": "a\\u2028b\\udb40\\udc41",
    "tab\tline\nÜber 日本 שלום 👩\u200d🚀 \u00a0": "tab\tline\nÜber 日本 שלום 👩\u200d🚀 \u00a0",
}


def test_each_kind() -> None:
    for text, shown in NASTY.items():
        assert (
            visible(text) == "".join(map(visible, text)) == shown
        )  # split over steps, in the worst way


@pytest.fixture
def roomy(tmp_path: Path) -> Path:
    """A tiny model with a chat template, whose text is any bytes at all."""
    return chatty_model(tmp_path / "model", 8192)


def on_a_screen(
    cli: Call, monkeypatch: pytest.MonkeyPatch, *argv: object, **more: object
) -> tuple[Outcome, Outcome]:
    """What a command prints on a terminal, and to a pipe."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal(sys.stdout))
        seen = cli(*argv, **more)
    piped = cli(*argv, **more)
    assert (seen.code, piped.code) == (0, 0), (seen, piped)
    return seen, piped


def test_generate_and_its_record(cli: Call, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("generate", "hello", "--continue", "--model", roomy, *LENGTH, "--quiet")
    seen, piped = on_a_screen(cli, monkeypatch, *argv)
    assert COMMANDING.search(piped.out)
    assert seen.out == visible(piped.out)
    seen, piped = on_a_screen(cli, monkeypatch, *argv, "--json", "-")
    assert not COMMANDING.search(seen.out)
    assert json.loads(seen.out)["text"] == json.loads(piped.out)["text"]


@pytest.mark.parametrize("odd", ["\x1b[2Ja", "a\nerror: b", "a\tb", "\u202eb"])
def test_names_command_nothing_and_stay_on_their_line(
    cli: Call, tiny: Path, tmp_path: Path, odd: str
) -> None:
    """Of models, runs and folders, in what is told, lists and errors, on a pipe too."""
    shown = on_one_line(odd)
    assert shown != odd
    model = shutil.copytree(tiny, tmp_path / odd)
    argv = ("--continue", "-n", 2, "--model")
    done = cli("generate", "hi", *argv, model)
    assert done.err.startswith(f"loading {tmp_path}/{shown}\n{tmp_path}/{shown}, float32 on ")
    cli("generate", "hi", *argv, tiny, "--run-dir", odd)
    runs = cli("runs", ".")
    assert runs.out.splitlines()[2].split("finished")[0].rstrip() == shown
    assert len(runs.out.splitlines()) == 3
    assert cli("runs", tmp_path / odd).out == f"no runs in {tmp_path}/{shown}\n"
    assert not COMMANDING.search(cli("resume", odd).err)
    failed = cli("generate", "hi", "--model", f"./none/{odd}")
    assert failed.code == 2
    assert failed.err.count("\n") == 1
    assert not COMMANDING.search(failed.err)


# ---- progress ------------------------------------------------------------------------------------

#: a program whose work is told to a line of progress, with a log line in the middle
DRIVER = """
import logging, time
from tokenswift.cli.progress import Stages
from tokenswift.cli.terminal import LogHandler
logger = logging.getLogger("tokenswift")
logger.addHandler(LogHandler())
with Stages(False, "beginning") as stages:
    time.sleep(0.4)
    stages("prompt", 1024, 6120)
    time.sleep(0.4)
    logger.warning("a line of \\x1b[31m[red]its own")
    stages("prompt", 6120, 6120)
    stages("odd [bold]name", 1, 2)
"""
CSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_moving_line_and_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves from the beginning, log lines stand above it, and in the end it is gone; the cursor
    stays."""
    screen, code = on_a_terminal("-c", DRIVER)
    words = CSI.sub("", screen)
    for part in ("beginning", "prefill: 1,024 of 6,120 ", "odd [bold]name: 1 of 2 ", "━"):
        assert part in words, screen
    assert "\na line of \\u001b[31m[red]its own" in re.sub(r"[\r\n]+", "\n", words), screen
    assert code == 0
    assert "\x1b[?25l" not in screen
    assert screen.endswith("\x1b[2K")


def test_no_progress_off_a_terminal(cli: Call, tiny: Path) -> None:
    done = cli("generate", "hello", "--model", tiny, "-n", 60, "--ignore-eos", "--continue")
    assert [line.split()[0] for line in done.err.splitlines()] == [
        "loading",
        f"{tiny},",
        "prompt:",
        "60",
    ]


# ---- failed writes -------------------------------------------------------------------------------

FULL = "failed (No space left on device)"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "> /dev/full",
            f"writing standard output {FULL}; 0 tokens were written, the text so far is",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("--json - > /dev/full", f"writing standard output {FULL}"),
                ("--output /dev/full", f"writing /dev/full {FULL}; what fitted in it was kept"),
                ("--json /dev/full", f"writing /dev/full {FULL}; what was there before was kept"),
                (">&-", "standard output is closed; nothing was begun"),
            )
        ),
    ],
)
def test_what_could_not_be_written_is_named(tiny: Path, more: str, words: str) -> None:
    command = (
        f"{sys.executable} -m tokenswift generate hello --model {tiny} --max-new-tokens 40 "
        f"--continue "
    )
    command += f"--ignore-eos --device cpu --quiet {more}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1


def test_a_pipe_that_is_closed(tiny: Path, tmp_path: Path) -> None:
    """It ends the run, which is kept; one line says how to go on."""
    argv = [
        "generate",
        "hello",
        "--model",
        str(tiny),
        "-n",
        "240",
        "--continue",
        "--ignore-eos",
        "--quiet",
    ]
    command = [sys.executable, "-m", "tokenswift", *argv, "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        words = (
            "error: standard output was closed; nothing more was generated; continue with: "
            "tokenswift "
        )
        assert process.stderr.read().decode() == f"{words}resume {tmp_path / 'run'}\n"
    assert process.returncode == 1
