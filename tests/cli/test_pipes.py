"""Prompts that come by a pipe, real ones, and what never waits; texts that end at the default
length."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, chatty_model
from tokenswift.cli.main import main
from tokenswift.cli.prompts import prompt_from


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 1024)


def prompt_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str, stdin: Any
) -> Any:
    """The prompt of a command line whose standard input is this; or its error."""
    seen: list[Any] = []

    def keep(args: Any) -> Any:
        seen.append(prompt_from(args))
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenswift.cli.generate.call_from", keep)
    monkeypatch.setattr(sys, "stdin", stdin)
    capsys.readouterr()
    main(["generate", *argv])
    return seen[0] if seen else capsys.readouterr().err


def piped(content: bytes) -> Any:
    """A pipe that holds this and is closed."""
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    return os.fdopen(read, encoding="utf-8")


def test_a_pipe_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(*argv: str, content: bytes = b"a\nb\n") -> Any:
        with piped(content) as stdin:
            return prompt_of(capsys, monkeypatch, *argv, stdin=stdin)

    assert prompt() == prompt("-") == prompt("--prompt-file", "-") == "a\nb"
    assert prompt("Why?") == "a\nb\n\nWhy?"
    assert prompt("Why?", content=b"") == "Why?"
    assert prompt("--prompt-ids", "1,2") == [1, 2]
    assert "standard input is empty; valid: at least one token" in prompt(content=b"")
    assert "standard input - is not UTF-8 (byte 1)" in prompt("Why?", content=b"a\xff")


def test_what_is_no_pipe_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device, a socket beside an argument, and standard input that is closed."""
    ours, theirs = (
        socket.socketpair()
    )  # never closed by the other side, as of a program that started this
    with (
        open("/dev/null", encoding="utf-8") as null,
        open("/dev/zero", encoding="utf-8") as zero,
        ours,
        theirs,
    ):
        for stdin in (null, zero, None):
            assert prompt_of(capsys, monkeypatch, "Why?", stdin=stdin) == "Why?"
            assert "no prompt given; valid: one of PROMPT" in prompt_of(
                capsys, monkeypatch, stdin=stdin
            )
        with ours.makefile("r", encoding="utf-8") as stream:
            assert prompt_of(capsys, monkeypatch, "Why?", stdin=stream) == "Why?"
            theirs.sendall(b"text")
            theirs.shutdown(socket.SHUT_WR)
            assert prompt_of(capsys, monkeypatch, stdin=stream) == "text"


# ---- the default length --------------------------------------------------------------------------


def test_the_default_length_is_said(cli: Call, chatty: Path) -> None:
    argv = (
        "generate",
        "hi",
        "--model",
        chatty,
        "--strategy",
        "autoregressive",
        "--ignore-eos",
        "--continue",
    )
    done = cli(*argv)
    assert done.code == 0
    words = "; stopped at its maximum length; --max-new-tokens sets another"
    assert done.err.splitlines()[-1].endswith(words)
    assert cli(*argv, "--max-new-tokens", "200").out == done.out


def test_an_answer_ends_where_the_model_ends_it(cli: Call, chatty: Path) -> None:
    argv = (
        "generate",
        "hi",
        "--model",
        chatty,
        "--strategy",
        "autoregressive",
        "--ignore-eos",
        "--json",
    )
    looping = json.loads(cli(*argv, "--greedy").out)
    assert looping["finish_reason"] == "loop"
    assert looping["prompt_tokens"] + len(looping["token_ids"]) < 1024
    done = cli(*argv)
    record = json.loads(done.out)
    assert record["prompt_tokens"] + len(record["token_ids"]) == 1024
