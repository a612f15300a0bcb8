"""The page on the structure of the code shows what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import floors

ROOT = Path(__file__).parents[1]


PACKAGE = ROOT / "src" / "tokenswift"
PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def test_every_package_has_a_sentence() -> None:
    named = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    packages = [path.name for path in folders if any(inner.is_file() for inner in path.iterdir())]
    assert sorted(named) == sorted(packages)


def test_every_file_of_the_reading_order_is_there() -> None:
    order = PAGE.partition("## Reading order")[2]
    files = re.findall(r"`([\w/]+/\w+\.py|tree\.py)`", order)
    assert len(files) > 10
    assert [name for name in files if not (PACKAGE / name).is_file()] == []


def test_the_picture_shows_the_floors_of_today() -> None:
    contracts = floors.CONTRACTS.read_text(encoding="utf-8")
    picture = floors.PICTURE.read_text(encoding="utf-8")
    assert picture == floors.draw(contracts), "run python tools/floors.py"


@pytest.mark.parametrize(
    "line, floor",
    [
        ("cli", floors.Floor(("cli",), touching=False)),
        ("audit | serve", floors.Floor(("audit", "serve"), touching=False)),
        ("grammar : lark", floors.Floor(("grammar", "lark"), touching=True)),
    ],
)
def test_a_floor_is_read_as_import_linter_reads_it(line: str, floor: floors.Floor) -> None:
    assert floors.floor_of(line) == floor
