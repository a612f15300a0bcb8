"""The page on the structure of the code lists the packages that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_has_a_sentence() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    folders = [path for path in (ROOT / "src" / "tokenswift").iterdir() if path.is_dir()]
    packages = [path.name for path in folders if any(inner.is_file() for inner in path.iterdir())]
    assert sorted(named) == sorted(name for name in packages if name != "__pycache__")
