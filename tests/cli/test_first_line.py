"""Every command speaks before it imports anything that takes seconds; nothing of it with --quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM

#: runs the command line and stops it where it begins to import something heavy; says what was written by then
DRIVER = """
import io, json, os, sys

real, out, err = sys.stdout, io.StringIO(), io.StringIO()
sys.stdout, sys.stderr = out, err

def tell(heavy):
    real.write(json.dumps({"heavy": heavy, "out": out.getvalue(), "err": err.getvalue()}))
    real.flush()
    os._exit(0)

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "numpy", "safetensors", "jaxtyping"):
            tell(name)

sys.meta_path.insert(0, Gate())
from tokenswift.cli.main import main
main(sys.argv[1:])
tell("")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model, a run and a text."""
    made = tmp_path_factory.mktemp("first")
    model = tiny_model("llama")
    model.save_pretrained(made / "model")
    tiny_tokenizer().save_pretrained(made / "model")
    LLM.from_model(model, tiny_tokenizer()).generate("hello", 4, ignore_eos=True, run_dir=made / "run")
    journal = made / "run" / "journal"
    assert journal.exists()
    (made / "text.txt").write_text("a text")
    return made


def first(folder: Path, *argv: str) -> dict[str, str]:
    """What was written when the first heavy import began, and its name ("" when the command was done)."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if not k.startswith("TOKENSWIFT")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_help_and_version_need_nothing_heavy(folder: Path) -> None:
    shown = first(folder, "--version")
    assert shown["heavy"] == "" and shown["out"].startswith("tokenswift 0.1.0 (torch ")
    assert "transformers " in shown["out"] and "; device " in shown["out"]
    assert first(folder, "--help")["heavy"] == ""


def test_python_m(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenswift", "generate", "x", "--top-p", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (2, "error: --top-p is 2.0; valid: in (0, 1]\n")
