"""A way to call the command line in this process and look at everything that it did."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenswift.cli.main import main


@dataclass
class Outcome:
    """Exit code, both streams, and the names of the files in the working folder afterwards."""

    code: int
    out: str
    err: str
    files: list[str]

    @property
    def error(self) -> str:
        """The one error line (asserts that only what a command begins with stands before it)."""
        *first, last = self.err.splitlines()
        assert self.err.endswith("\n") and last.startswith("error: "), self.err
        assert all(line.startswith(("loading ", "auditing ", "reading ")) for line in first), self.err
        return last.removeprefix("error: ")


Call = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """``cli("generate", "hi", "--seed", "1")`` runs in an empty working folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*argv: object, stdin: Path | None = None) -> Outcome:
        with open(stdin or "/dev/null", encoding="utf-8") as handle:
            monkeypatch.setattr(sys, "stdin", handle)
            capsys.readouterr()  # what fixtures printed
            code = main([str(word) for word in argv])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err, sorted(p.name for p in folder.rglob("*")))

    return call


@pytest.fixture
def tiny(tiny_folder: Callable[..., Path]) -> Path:
    """A tiny Llama: one token per byte, 260 tokens, 256 positions."""
    return tiny_folder()
