"""Models over several devices from the command line: places by a file, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenswift import LLM
from tokenswift.cli.main import main

DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
DISK |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
IDS = list(range(40, 60))
ASKED = ["--prompt-ids", ",".join(map(str, IDS)), "--ignore-eos", "--heads", "none", "--greedy"]


@pytest.fixture
def folder(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("llama", max_position_embeddings=1024))


@pytest.fixture
def places(tmp_path: Path) -> str:
    path = tmp_path / "places.json"
    path.write_text(json.dumps(DISK))
    return str(path)


def test_a_file_of_places(
    folder: str, places: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = LLM(folder, heads=None).generate(IDS, 16, greedy=True, ignore_eos=True).token_ids
    run, record = str(tmp_path / "run"), tmp_path / "record.json"
    plain = ["--strategy", "autoregressive"]
    left = ["--run-dir", run, "--max-new-tokens", "8", "--device-map", places]
    assert main(["generate", "--model", folder, *ASKED, *plain, *left]) == 0
    assert "layers are placed by device_map: transformers' own forward is used" in capfd.readouterr().err
    assert main(["resume", run, "--max-new-tokens", "12", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["token_ids"] == expected[:12]
    assert main(["resume", run, "--max-new-tokens", "16", "--device-map", "auto", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["token_ids"] == expected


@pytest.mark.parametrize(
    "options, line",
    [
        (["--device-map", "nowhere.json"], "--device-map: its nowhere.json cannot be used (No such file"),
        (
            ["--device-map", "auto", "--device", "cpu"],
            "--device is 'cpu' beside --device-map; valid: auto",
        ),
    ],
)
def test_what_is_refused(
    folder: str,
    options: list[str],
    line: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--model", folder, *ASKED, *options]) == 2
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {line}")
