"""Builds the sdist and a wheel of each platform, and tries those that this machine can run: ``make wheels``.

Each wheel is built from the sdist, with kernels that stay in build/kernels while their sources do. Linux
wheels are checked by auditwheel against the glibc of their tag. A wheel is tried in a new environment, with
nothing but it and what it asks for, and no compiler in reach: the default model writes 20 tokens, and
``tokenswift audit`` has to find nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenswift.kernels.cpu import prebuilt

ROOT = Path(__file__).resolve().parent.parent
MOST = 40 << 20  # bytes of a wheel
HERE = {
    "linux-x86_64": ("linux", "x86_64"),
    "linux-aarch64": ("linux", "arm64"),
    "macos-arm64": ("darwin", "arm64"),
}


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints; ends the program where it fails."""
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"error: {command[0]} {command[1]} … ended with {ran.returncode}\n{ran.stdout[-2000:]}")
    return ran.stdout


def sdist(out: Path) -> Path:
    """The sdist, made anew."""
    with tempfile.TemporaryDirectory() as work:
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work)
        made = next(Path(work).glob("*.tar.gz"))
        return Path(shutil.copy(made, out))


def wheel(source: Path, platform: str, out: Path) -> Path:
    """A platform's wheel, built from the sdist and checked."""
    tag, kernels = prebuilt.PLATFORMS[platform].tag, ROOT / "build" / "kernels" / platform
    if not isinstance(prebuilt.about(kernels), dict):
        prebuilt.make(platform, kernels)
    with tempfile.TemporaryDirectory() as work:
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
        run(
            *pip,
            "--wheel-dir",
            work,
            source,
            TOKENSWIFT_WHEEL=platform,
            TOKENSWIFT_WHEEL_KERNELS=str(kernels),
        )
        made = next(Path(work).glob("*.whl"))
        if tag.startswith("manylinux"):
            least = re.search(r"manylinux_2_(\d+)_", run(sys.executable, "-m", "auditwheel", "show", made))
            if least is None or int(least[1]) > int(tag.split("_")[2]):
                sys.exit(
                    f"error: {made.name} needs {least[0] if least else 'a newer glibc, or other libraries'}"
                )
        found = Path(shutil.copy(made, out))
    if not found.name.endswith(f"-py3-none-{tag}.whl"):
        sys.exit(f"error: the wheel is {found.name}; it should be for {tag}")
    if (size := found.stat().st_size) > MOST:
        sys.exit(f"error: {found.name} has {size:,} bytes; valid: at most {MOST:,}")
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(found) as archive:
        archive.extractall(work)
        told = prebuilt.about(Path(work) / "tokenswift/kernels/cpu/built")
        if not isinstance(told, dict):
            sys.exit(f"error: {found.name}: its kernels cannot be used ({told or 'there are none'})")
    return found


def tried(made: Path, work: Path) -> str:
    """What the installed command says of itself, after it has written and audited without a compiler."""
    run(sys.executable, "-m", "venv", work / "venv")
    python = work / "venv/bin/python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        made,
        PYTHONPATH="",
    )
    command = work / "venv/bin/tokenswift"
    # no compiler is in the environment's own folder, and nothing else is in reach
    alone = {"PATH": str(command.parent), "PYTHONPATH": "", "TOKENSWIFT_CACHE": str(work / "cache")}
    said = run(command, "--version", **alone)
    if "built in" not in said:
        sys.exit(f"error: {made.name} does not use its kernels: {said}")
    run(command, "generate", "--continue", "The lamp", "--max-new-tokens", "20", "--ignore-eos", **alone)
    run(command, "audit", "--max-new-tokens", "16", **alone)
    if list((work / "cache").glob("kernels/*.so")):
        sys.exit(f"error: {made.name} compiled kernels")
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist and wheels, and try them.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--platforms", nargs="+", choices=list(prebuilt.PLATFORMS), default=list(prebuilt.PLATFORMS)
    )
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    source = sdist(given.out)
    print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB", flush=True)
    for platform in given.platforms:
        try:
            made = wheel(source, platform, given.out)
        except prebuilt.BuildError as error:
            sys.exit(f"error: {platform}: {error}")
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB", flush=True)
        if HERE[platform] == (sys.platform, prebuilt.architecture()):
            with tempfile.TemporaryDirectory() as work:
                print(f"tried: {tried(made, Path(work))}", flush=True)
        else:
            print("built, not run: another platform", flush=True)


if __name__ == "__main__":
    main()
