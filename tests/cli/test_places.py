"""No output of a command is one of its inputs, whatever the option and however the path is
written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.cli.test_bad_inputs import seen
from tokenswift.cli import options
from tokenswift.loader import load as load_module


@pytest.fixture
def place(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with files that are read and other ways to name them; loading a model
    fails the test."""
    folder = tmp_path / "cwd"
    for name in ("m.gguf", "h.safetensors", "e.gguf", "prompt.txt", "schema.json", "p.jsonl"):
        (folder / name).write_text("{}")
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("model/config.json", "model/deep/weights.bin", "texts/a.txt", "run/journal"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    os.symlink("m.gguf", folder / "link")
    os.link(folder / "m.gguf", folder / "second")
    os.symlink("model", folder / "models")

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_model", load)
    monkeypatch.setattr(load_module, "load", load)
    return folder


#: a command line, and the two options that its error names
CASES = [
    ("generate hi --model m.gguf --output m.gguf", "--model", "--output"),
    ("generate hi --model m.gguf --json ./m.gguf", "--model", "--json"),
    ("generate hi --model m.gguf --output link", "--model", "--output"),
    ("generate hi --model m.gguf --output second", "--model", "--output"),
    ("generate hi --model link --json second", "--model", "--json"),
    ("generate hi --model model --json models/config.json", "--model", "--json"),
    ("generate hi --model model --output model/deep/weights.bin", "--model", "--output"),
    ("generate hi --heads h.safetensors --output h.safetensors", "--heads", "--output"),
    ("generate hi --eagle e.gguf --json e.gguf", "--eagle", "--json"),
    (
        "generate hi --strategy triforce --draft-model model --json model/config.json",
        "--draft-model",
        "--json",
    ),
    ("generate --prompt-file prompt.txt --output prompt.txt", "--prompt-file", "--output"),
    ("generate --prompt-file prompt.txt --json prompt.txt", "--prompt-file", "--json"),
    ("generate hi --json-schema schema.json --json schema.json", "--json-schema", "--json"),
    ("generate --prompts p.jsonl --out d --json p.jsonl", "--prompts", "--json"),
    ("generate --prompts p.jsonl --out model --model model", "--model", "--out"),
    ("generate hi --output t --json ./t", "--output", "--json"),
    ("generate hi --run-dir new --json new/journal", "--run-dir", "--json"),
    ("resume run --json run/journal", "--run-dir", "--json"),
    ("runs run --text run/journal", "the run", "--text"),
    ("runs . --json run/journal", "the run", "--json"),
    ("plan --prompt-file prompt.txt --json prompt.txt", "--prompt-file", "--json"),
    ("demo --model m.gguf --json m.gguf", "--model", "--json"),
    ("bench --model m.gguf --json m.gguf", "--model", "--json"),
    ("audit --model m.gguf --json m.gguf", "--model", "--json"),
    ("train --model m.gguf --out m.gguf", "--model", "--out"),
    ("train --model m.gguf --data texts --out texts/a.txt", "--data", "--out"),
    ("train --model model --out new --work models", "--model", "--work"),
]


@pytest.mark.parametrize(("argv", "read", "written"), CASES)
def test_no_output_is_an_input(cli: Call, place: Path, argv: str, read: str, written: str) -> None:
    before = seen(place)
    done = cli(*argv.split())
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert f"{read} " in done.err
    assert f"{written} " in done.err
    assert "; valid: " in done.err
    assert seen(place) == before


def test_no_output_is_a_file_of_a_cached_model(
    cli: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(place / "model", tmp_path / "cache" / "smollm2-135m")
    file = tmp_path / "cache" / "smollm2-135m" / "config.json"
    done = cli("generate", "hi", "--output", file)
    assert done.code == 2
    assert f"--output {file} is a file of --model" in done.error


def test_no_output_is_the_file_at_standard_input(
    cli: Call, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.dup(0)
    with open(place / "prompt.txt", encoding="utf-8") as file:
        os.dup2(file.fileno(), 0)
        try:
            done = cli("generate", "hi", "--output", "prompt.txt")
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert "standard input and --output are both prompt.txt" in done.error


@pytest.mark.parametrize(
    "argv", ["generate hi --output /dev/null --json /dev/null", "generate hi --json model/new"]
)
def test_devices_and_new_files_are_no_inputs(cli: Call, place: Path, argv: str) -> None:
    assert "loaded" in cli(*argv.split(), "--model", "model").err
