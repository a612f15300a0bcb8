"""Every file of the package is in its wheel, drafters among them, and found wherever that is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import tokenswift
from tokenswift.loader.default_model import trained_files
from tokenswift.loader.named_models import QWEN, QWEN_SMALL

PACKAGE = Path(tokenswift.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
#: what compilers leave beside sources
LEFT = ("__pycache__", "built")


def packaged() -> set[Path]:
    """The files that the patterns of pyproject.toml put into a wheel."""
    settings = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["tokenswift"]
    return {path for pattern in patterns for path in PACKAGE.glob(pattern)}


def test_every_file_that_is_no_python_is_in_the_wheel() -> None:
    files = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and not set(LEFT) & set(path.parts)
    }
    assert files - packaged() == set()


def test_trained_drafters_are_part_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    files = trained_files(".gguf")
    assert [file.name for file in files] == [QWEN_SMALL.file, QWEN.file]
    assert set(files) <= packaged()


def test_a_drafter_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    mine = tmp_path / "drafters" / "mine.gguf"
    mine.parent.mkdir()
    mine.write_bytes(b"")
    assert trained_files(".gguf")[0] == mine
