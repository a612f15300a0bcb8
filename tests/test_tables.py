"""The tables of the docs are those of the rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
