"""Lists of runs: states and figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import CALL, begin
from tokenswift import LLM, InputError, resume
from tokenswift.runs.lists import cells, summaries


def test_states_and_figures(tmp_path: Path) -> None:
    """One that was interrupted, one that has ended, one whose journal is damaged, one that is
    none."""
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    for name in ("a", "b", "c"):
        begin(llm, tmp_path / name, 12, strategy="autoregressive")
    resume(tmp_path / "b", llm=llm)
    with open(tmp_path / "c" / "journal", "ab") as file:
        file.write(b"hello\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "journal").write_text("hello")
    rows = [cells(row) for row in summaries(tmp_path)]
    states = ["interrupted", "finished (length)", "damaged at byte", "unreadable: "]
    assert all(row["state"].startswith(state) for row, state in zip(rows, states, strict=True))
    assert [row["tokens"] for row in rows[:3]] == ["12", "90", "12"]
    assert rows[1]["sessions"] == "2"
    with llm.stream("hello", **CALL, run_dir=tmp_path / "a") as stream:
        next(stream)
        assert summaries(tmp_path / "a")[0]["state"] == "running"
    with pytest.raises(InputError, match="no such folder"):
        summaries(tmp_path / "none")


def test_nothing_is_loaded_for_it() -> None:
    """Reading journals needs no torch: it would take seconds."""
    code = "import sys, tokenswift.runs.folder, tokenswift.cli.generate;"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
