"""The whole package on arm64, emulated: ``make test-arm64``.

Debian's Python for arm64 and the dependencies' wheels are fetched into a folder, the wheel for
arm64 is built and installed there, with the kernels of ``make wheels`` where that has been run, and
``qemu-user`` runs the default model in int8: its tokens have to be those of
``tests/data/frozen.json``, which x86-64 writes. Needs Debian with qemu-user-static,
gcc-aarch64-linux-gnu and apt; some minutes, and 1.5 GB of disk.

The torch of this environment is the last one for arm64 on PyPI that brings no CUDA (2.5 GB); the
tokens are those of the compiled kernels.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "apt-get", "dpkg-deb")
PACKAGES = ("python3-minimal", "python3", "libstdc++6", "libgomp1")
TORCH = "torch==2.10.0"
LEFT_OUT = ("torch", "pip", "accelerate")  # of the dependencies
NEEDED_BY_TORCH = ("sympy", "networkx", "typing-extensions", "fsspec", "setuptools")
KERNELS = "linux-aarch64"
MODEL = "smollm2-135m"
RUNS = ("autoregressive", "tokenswift")


def run(command: Sequence[str | Path], **environment: str) -> None:
    """Run a command; its end with an error is one of this program."""
    words = [str(word) for word in command]
    subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, **environment})


def fetch_system(folder: Path) -> Path:
    """Debian's packages for arm64, unpacked; the machine's own are not touched."""
    root = folder / "root"
    if root.exists():
        return root
    apt = folder / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run(["apt-get", *options, "-q", "update"])
    download = ["-qy", "--no-install-recommends", "--download-only", "install", *PACKAGES]
    run(["apt-get", *options, *download])
    part = folder / "root.part"
    shutil.rmtree(part, ignore_errors=True)
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        run(["dpkg-deb", "-x", package, part])
    part.rename(root)
    return root


def install(folder: Path, root: Path) -> Path:
    """An environment with the package in it; its Python."""
    program = next((root / "usr/bin").glob("python3.*[0-9]"))
    version = program.name.removeprefix("python")
    packages = folder / f"venv/lib/python{version}/site-packages"
    python = emulated_python(folder, root, program, version)
    pip = pip_for_arm64(packages, version)
    if not packages.exists():
        about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        dependencies = [
            name for name in about["project"]["dependencies"] if not name.startswith(LEFT_OUT)
        ]
        run([*pip, "--constraint", "constraints.txt", *dependencies, *NEEDED_BY_TORCH])
        run([*pip, "--no-deps", TORCH])
    run([*pip, "--no-deps", build_wheel(folder)])
    return python


def emulated_python(folder: Path, root: Path, program: Path, version: str) -> Path:
    """A script in the place of an environment's Python, which calls the emulator, so that Python
    can start itself."""
    python = folder / "venv/bin/python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    words = ["qemu-aarch64-static", "-cpu", "max", "-L", root, "-0", python, program]
    python.write_text(f'#!/bin/sh\nexec {" ".join(map(str, words))} "$@"\n')
    python.chmod(0o755)
    settings = folder / "venv/pyvenv.cfg"
    settings.write_text(f"home = {program.parent}\nversion = {version}\n")
    return python


def pip_for_arm64(packages: Path, version: str) -> list[str]:
    """The command that installs wheels for arm64 into a folder."""
    tags = ["manylinux2014_aarch64"]
    tags += [f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)]
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(packages),
        "--upgrade",
        "--python-version",
        version,
        "--only-binary=:all:",
        *(f"--platform={tag}" for tag in tags),
    ]


def build_wheel(folder: Path) -> Path:
    """The package's wheel for arm64."""
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    run(
        [*command, wheels, "."],
        TOKENSWIFT_WHEEL=KERNELS,
        TOKENSWIFT_WHEEL_KERNELS=str(kernels_in(folder)),
    )
    return next(wheels.glob("*.whl"))


def kernels_in(folder: Path) -> Path:
    """The folder of the kernels for arm64: those of ``make wheels``, or compiled into this
    folder."""
    kernels = runpy.run_path(str(ROOT / "tools/kernels.py"))
    compiled = folder / "kernels"
    for place in (ROOT / "build" / "kernels" / KERNELS, compiled):
        if all((place / name).exists() for name in kernels["names_of"](KERNELS)):
            print(f"kernels: {place}", flush=True)
            return place
    kernels["make"](KERNELS, compiled, ["aarch64-linux-gnu-gcc"])
    return compiled


def cache_with_model(folder: Path) -> Path:
    """A cache of its own, with this machine's copy of the default model."""
    from tokenswift import LLM
    from tokenswift.loader.default_model import cache_dir

    if not (cache_dir() / MODEL).exists():
        LLM(MODEL, device="cpu").close()
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / MODEL).exists():
        (cache / MODEL).symlink_to(cache_dir() / MODEL)
    return cache


def check() -> None:
    """In the emulated Python: write runs and compare them."""
    import json

    from tokenswift import LLM
    from tokenswift.models.target import backend_for

    frozen = runpy.run_path(str(ROOT / "tests/lossless/frozen.py"))
    expected = json.loads(frozen["FILE"].read_text(encoding="utf-8"))["int8"]
    llm = LLM(MODEL, dtype="int8", device="cpu")
    print(
        platform.machine(), getattr(backend_for("cpu"), "build", "no compiled kernels"), flush=True
    )
    prompt = llm.encode((frozen["PROMPTS"] / "harbour.txt").read_text(encoding="utf-8"))[
        : frozen["LENGTH"]
    ]
    for name in RUNS:
        options = frozen["STRATEGIES"][name]
        params = frozen["SAMPLERS"]["paper"]
        out = llm.generate(prompt, frozen["NEW"], name, options, params, ignore_eos=True)
        same = frozen["digest"](out) == expected[f"{name} paper int8 harbour"]
        print(
            f"{name}: {len(out.token_ids)} tokens, {'as frozen' if same else 'OTHERS'}", flush=True
        )
        if not same:
            sys.exit(1)


def main() -> None:
    """Fetch what is missing, build, install, run."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        sys.exit(f"test-arm64 is left out: there is no {', no '.join(missing)}")
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = install(folder, fetch_system(folder))
    run(
        [python, __file__, "check"],
        OMP_NUM_THREADS="1",
        TOKENSWIFT_CACHE=str(cache_with_model(folder)),
        PYTHONPATH="",
    )


if __name__ == "__main__":
    check() if sys.argv[1:] == ["check"] else main()
