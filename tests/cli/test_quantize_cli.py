"""`tokenswift quantize`: what it says and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli import quantize

DRIVER = """
import os, signal, sys
from tokenswift.loader.gguf import write as write_gguf

def data(*args):
    os.kill(os.getpid(), int(sys.argv[1]))

write_gguf._data = data
from tokenswift.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""


def test_kinds() -> None:
    from tokenswift.loader.gguf.write import KINDS

    assert quantize.KINDS == KINDS


def test_a_file_that_is_generated_from(cli: Call, tiny: Path) -> None:
    done = cli("quantize", tiny, "q.gguf", "--weights", "q4_0")
    assert done.code == 0 and done.out == "" and done.files == ["q.gguf"]
    first, last = done.err.splitlines()
    assert first == f"reading {tiny}" and last.startswith(
        "wrote q.gguf: q4_0 and q8_0, 0.0 MB of 0.1 MB, in "
    )
    shown = cli("generate", "hello", "--model", "q.gguf", "--max-new-tokens", "3", "--ignore-eos", "--raw")
    assert shown.code == 0, shown
    again = cli("quantize", tiny, "q.gguf")
    assert again.code == 2 and again.error == "DST q.gguf exists; valid: another name, or --force"
    record = cli("quantize", tiny, "q.gguf", "--force", "--quiet", "--json")
    assert record.code == 0 and record.err == ""
    found = json.loads(record.out)
    assert found["bytes_out"] == Path("q.gguf").stat().st_size and found["bytes_in"] > found["bytes_out"]
    assert (found["weights"], found["head_weights"], found["notes"]) == ("q8_0", "q8_0", [])
    twice = cli("quantize", "q.gguf", "r.gguf", "--weights", "q4_1", "--json", "r.json")
    assert twice.code == 0 and "its weights are q8_0: what is quantised twice loses twice" in twice.err
    assert json.loads(Path("r.json").read_text())["weights"] == "q4_1"


def test_refusals_leave_nothing(cli: Call, tiny: Path) -> None:
    done = cli("quantize", tiny, tiny / "model.safetensors", "--force")
    assert done.code == 2 and "valid: a file name that ends in .gguf" in done.error
    done = cli("quantize", tiny, "no/where/q.gguf")
    assert done.code == 2 and done.files == [], done
    assert done.error == (
        "DST no/where/q.gguf cannot be written (there is no folder no/where); valid: a writable file"
    )
    Path("link.gguf").symlink_to(tiny / "model.safetensors")
    done = cli("quantize", tiny, "link.gguf", "--force")
    assert done.code == 2 and "DST link.gguf is the file of SRC, model.safetensors" in done.error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tiny: Path, tmp_path: Path, number: int) -> None:
    argv = [sys.executable, "-c", DRIVER, str(int(number)), "quantize", str(tiny), str(tmp_path / "q.gguf")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and done.stderr.count("\n") == 2
    assert not list(tmp_path.iterdir())
