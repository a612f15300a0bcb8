"""What ``make wheels`` lacks is said before anything is built; a wheel brings its drafters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tokenswift.loader.default_model import cache_dir
from tokenswift.loader.named_models import QWEN
from tools import wheels

ROOT = Path(__file__).parents[1]
#: what a wheel is built from
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src", "tools")


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


@pytest.mark.slow
def test_a_model_from_a_wheel_drafts_with_its_trained_drafter(tmp_path: Path) -> None:
    """Outside the checkout, with the modules of the wheel alone."""
    if not QWEN.is_whole(cache_dir()) or find_spec("setuptools") is None:
        pytest.skip("the model is not in the cache, or setuptools is not installed")
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, timeout=300)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    generate = [sys.executable, "-P", "-m", "tokenswift", "generate", "-m", QWEN.name, "-n", "60"]
    done = subprocess.run(
        [*generate, "-v", "Write a Python function that merges two sorted lists."],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "drafter: trained for this model" in done.stderr
