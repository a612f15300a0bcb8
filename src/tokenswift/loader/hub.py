"""A model of the hub: fetched into the hub's own cache with the hub's own progress bars.

What transformers needs of a repository is fetched and no more: weights once, not in three formats.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenswift.loader.gguf import MERGED, part_names
from tokenswift.types import InputError
from tokenswift.words import counted

TIMEOUT = 8  # seconds for the one question whether the hub answers
#: what a model's folder needs besides weights, by the end of the file's name
NEEDED = (".json", ".txt", ".model", ".jinja")
ADAPTER = "adapter_config.json"
HEADER = 32 << 20  # bytes in which every GGUF file's header ends; most of it is the tokenizer's
#: files that are weights a second time
TWICE = ("consolidated", "pytorch_model.bin.index", "tf_model", "flax_model")

logger = logging.getLogger("tokenswift")


def answers() -> str | None:
    """None when the hub can be asked, else why not."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off by HF_HUB_OFFLINE"
    try:  # one question with a short timeout, instead of transformers' retries per file
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # the HTTP library differs between versions, and so do its errors
        return f"the hub cannot be reached ({line_of(error)})"
    return None


def file_of(source: str, file: str, local: bool) -> Path | None:
    """A small file of a model: in its folder, or of a hub id, fetched unless only ``local`` files may be
    used; None where there is none."""
    folder = Path(source)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    if local:
        found = cached_file(source, file)
        return None if found is None else Path(found)
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, file))


def fetch(name: str) -> str:
    """The folder of a hub model, of its newest version; what is missing there is fetched.

    The announcement is a WARNING of the logger ``tokenswift``; the hub's bars are shown where that is.

    Args:
        name: ``owner/name``.
    Raises:
        InputError: there is no such model, or it must not or cannot be fetched.
    """
    with _explained(name, "a folder in transformers' format"):
        sizes = _sizes(name)
        wanted = wanted_files(list(sizes))
        if (files := _gguf(sizes)) and not any(file.endswith((".safetensors", ".bin")) for file in wanted):
            raise InputError(
                f"model {name} on the hub has GGUF files; valid: {name}:FILE with one of {files}"
            )
        if ADAPTER in sizes:
            raise InputError(f"model {name} on the hub holds an adapter ({ADAPTER}); valid: {MERGED}")
        if "config.json" not in wanted:
            raise InputError(f"model {name} on the hub has no config.json; valid: a transformers checkpoint")
        return str(_fetched(name, wanted, sizes))


def cached_file(name: str, file: str) -> str | None:
    """The path of one file of a hub model in the hub's local cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return found if isinstance(found, str) else None


def cached_gguf(name: str, file: str) -> str | None:
    """The path that :func:`fetch_file` returns, where all of it is in the hub's local cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    try:
        folder = kept / "snapshots" / (kept / "refs" / "main").read_text()
        there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        files = _files_of(name, file, there)
    except (OSError, InputError):
        return None
    return str(folder / files[0]) if set(files) <= set(there) else None


def fetch_file(name: str, file: str) -> str:
    """The path of one GGUF file of a hub model, of a split one that of its first part; what is missing is
    fetched and announced as :func:`fetch` does.

    Args:
        name: ``owner/name``.
        file: its path in the repository, or the format in its name, such as ``Q4_K_M``.
    Raises:
        InputError: there is no such model or file, or it must not or cannot be fetched.
    """
    with _explained(f"{name}:{file}", "a GGUF file"):
        sizes = _sizes(name)
        files = _files_of(name, file, list(sizes))
        return str(_fetched(name, files, sizes) / files[0])


def _files_of(name: str, wanted: str, there: Sequence[str]) -> list[str]:
    """The files of a repository that are meant by a path, or by a format.

    Raises:
        InputError: there is none, or several models.
    """
    ggufs = [file for file in there if file.lower().endswith(".gguf")]
    found = [wanted] if wanted in ggufs else []
    if not found and not wanted.lower().endswith(".gguf"):
        named = re.compile(rf"(?:^|.*[-./]){re.escape(wanted)}(?:[-./].*)?\.gguf", re.IGNORECASE)
        found = [file for file in ggufs if named.fullmatch(file) and "mmproj" not in file]
    models = sorted({_parts(file)[0] for file in found})
    if len(models) > 1:
        raise InputError(f"model {name} on the hub has several files {wanted}; valid: {_gguf(models)}")
    if not models:
        valid = _gguf(there) or "a model with GGUF files"
        raise InputError(f"model {name} on the hub has no file {wanted}; valid: {valid}")
    return _parts(models[0])


def _parts(file: str) -> list[str]:
    """A file of a repository, with its other parts where it is one of a split one."""
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(name)]


def _sizes(name: str) -> dict[str, int]:
    """The files of a hub model and their bytes."""
    from huggingface_hub import HfApi

    entries = HfApi().model_info(name, files_metadata=True).siblings or ()
    return {entry.rfilename: entry.size or 0 for entry in entries}


def _fetched(name: str, wanted: list[str], sizes: Mapping[str, int]) -> Path:
    """The folder of a hub model in the local cache, once these files are there."""
    from huggingface_hub import snapshot_download

    plan: Any = snapshot_download(name, allow_patterns=wanted, dry_run=True)
    missing = [file.filename for file in plan if file.will_download]
    if missing:
        size = sum(sizes.get(file, 0) for file in missing)
        files = missing[0] if len(missing) == 1 else counted(len(missing), "file")
        logger.warning("fetching %s from the hub: %s, %.1f MB", name, files, size / 1e6)
    with _bars(bool(missing)):
        return Path(snapshot_download(name, allow_patterns=wanted))


def header(name: str, file: str) -> bytes:
    """The first :data:`HEADER` bytes of a GGUF file of a hub model, where its header is: it is not kept.

    Raises:
        InputError: as of :func:`fetch_file`.
    """
    from huggingface_hub import HfFileSystem

    with _explained(f"{name}:{file}", "a GGUF file"):
        if not file.lower().endswith(".gguf"):
            file = _files_of(name, file, list(_sizes(name)))[0]
        hub = HfFileSystem(skip_instance_cache=True)
        there: Any = hub.open(f"{name}/{file}", "rb", cache_type="none")  # nothing beyond what is read
        with there:
            return there.read(HEADER)


@contextmanager
def _explained(model: str, local: str) -> Iterator[None]:
    """What goes wrong with the hub is one line; ``local``: what is valid without it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the hub's errors, the HTTP library's and the system's
        raise InputError(
            f"model {model} cannot be fetched from the hub ({line_of(error)}); valid: a public model, one "
            f"that your token may read, or {local}"
        ) from error


def _gguf(files: Iterable[str]) -> str:
    """The GGUF files among some files, for messages."""
    firsts = {_parts(file)[0] for file in files if file.lower().endswith(".gguf")}
    return ", ".join(sorted(firsts)[:12])


@contextmanager
def _bars(wanted: bool = True) -> Iterator[None]:
    """Show the hub's progress bars inside the block where the announcement is shown, and else none."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not (wanted and logger.isEnabledFor(logging.WARNING)) and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that a transformers model needs: configuration, tokenizer, weights once."""
    top = [name for name in names if "/" not in name and not name.startswith(TWICE)]
    safe = [name for name in top if name.endswith(".safetensors")]
    weights = safe or [name for name in names if "/" not in name and name.startswith("pytorch_model")]
    return sorted({name for name in top if name.endswith(NEEDED)} | set(weights))


def line_of(error: BaseException) -> str:
    """An error's message on one line, without its later sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157].rstrip() + "..."
