"""What ``make wheels`` lacks is said before anything is built."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tools import wheels


def test_a_compiler_that_is_not_there_is_named_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "sdist", lambda out: pytest.fail("built"))
    monkeypatch.setattr(
        shutil, "which", lambda name: None if "aarch64" in name else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(sys, "argv", ["wheels", "--out", str(tmp_path / "dist")])
    with pytest.raises(
        SystemExit, match="linux-aarch64 needs aarch64-linux-gnu-gcc.*gcc-aarch64-linux-gnu"
    ):
        wheels.main()
    assert not (tmp_path / "dist").exists()
