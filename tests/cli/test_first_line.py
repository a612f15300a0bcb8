"""Every command speaks before it imports anything that takes seconds; nothing of it with --quiet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM
from tokenswift.cli.main import COMMANDS

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
#: command → arguments, and how its first line begins
CALLS: dict[str, tuple[str, str]] = {
    "generate": ("hi --model model", "loading model\n"),
    "chat": ("--model model", "loading model\n"),
    "serve": ("--model model --port 0", "loading model\n"),  # the usual port may be another's
    "resume": ("run", "loading "),
    "runs": (".", "run "),
    "models": ("", "reading /"),
    "text": ("run --output t.txt", "t.txt, 4 tokens"),
    "plan": ("hi --model model", "loading model\n"),
    "report": ("run", "run/report.html, "),
    "demo": ("--model model", "loading model\n"),
    "audit": ("--model model", "auditing model\n"),
    "train-heads": ("--model model --data self --out h", "loading model\n"),
    "train-draft": ("--model model --data self --out d", "loading model\n"),
    "train-eagle": ("--model model --data self --out e", "loading model\n"),
    "eval-heads": ("--model model --data text.txt", "loading model\n"),
    "import-heads": ("--checkpoint model --out h", "reading model\n"),
    "bench": ("--model model --contexts 8 --rows 1 --repeats 1 -n 2", "loading model\n"),
}


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


@pytest.mark.parametrize(
    "command",
    [
        name if name in ("generate", "runs", "audit") else pytest.param(name, marks=pytest.mark.slow)
        for name in (name.replace("_", "-") for name in COMMANDS)
    ],
)
def test_a_line_comes_before_heavy_imports(folder: Path, command: str) -> None:
    argv, line = CALLS[command]
    found = first(folder, command, *argv.split())
    assert (found["out"] + found["err"]).startswith(line), found
    assert found["heavy"] in ("", "torch", "numpy", "transformers", "safetensors"), found


def test_quiet_is_quiet(folder: Path) -> None:
    found = first(folder, "generate", "hi", "--model", "model", "--quiet")
    assert found["heavy"] and found["out"] == found["err"] == ""


def test_help_and_version_need_nothing_heavy(folder: Path) -> None:
    shown = first(folder, "--version")
    assert shown["heavy"] == "" and shown["out"].startswith("tokenswift 0.1.0 (torch ")
    assert "transformers " in shown["out"] and "; device " in shown["out"]
    assert first(folder, "--help")["heavy"] == ""


def test_unknown_kernels_are_one_line(folder: Path) -> None:
    for argv in (("--version",), ("generate", "hi", "--model", "model", "--quiet")):
        done = subprocess.run(
            [sys.executable, "-m", "tokenswift", *argv],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"TOKENSWIFT_KERNELS": "sse9"},
        )
        assert done.returncode == 2 and done.stdout == ""
        assert re.fullmatch(
            r"error: TOKENSWIFT_KERNELS is 'sse9'; valid: auto, torch, native, .*\n", done.stderr
        )


def test_python_m(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenswift", "generate", "x", "--top-p", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (2, "error: --top-p is 2.0; valid: in (0, 1]\n")
