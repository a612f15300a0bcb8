"""From a model's name to its files: aliases, local folders, GGUF files and hub ids.

The cache folder is ``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenswift.files import line_of
from tokenswift.loader import default_model
from tokenswift.loader.identity import MERGED
from tokenswift.types import InputError, RunError
from tokenswift.words import counted

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """The names of a model's files, of which one is given: itself, or all parts of a split file in order."""
    found = PART.fullmatch(name)
    if found is None:
        return [name]
    stem, _, count, end = found.groups()
    return [f"{stem}-{number:05}-of-{count}{end}" for number in range(1, int(count) + 1)]


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights; of a split
    file the first part; light.

    Raises:
        InputError: a folder holds several.
    """
    if path.is_file():
        return path.with_name(part_names(path.name)[0]) if path.name.lower().endswith(".gguf") else None
    if not path.is_dir():
        return None
    files = sorted(file.name for file in path.iterdir() if file.is_file())
    found = [file for file in files if file.lower().endswith(".gguf")]
    if not found or any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
        return None
    if found != part_names(found[0]) and len(found) > 1:
        names = ", ".join(found[:3])
        raise InputError(f"model folder {path} holds {len(found)} GGUF files ({names}); valid: one of them")
    return path / found[0]


ALIASES = (default_model.NAME, default_model.DRAFT)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: a repository's file, in a folder of it perhaps, or what its name says of its format, such as Q4_K_M
GGUF_FILE = re.compile(rf"({HUB_ID.pattern}):([\w.+-]+(?:/[\w.+-]+)*)")


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    if own := os.environ.get("TOKENSWIFT_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


def check_name(name: str) -> None:
    """What can be said of a model's name without asking the hub; light.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a GGUF file or a folder with one,
            nor shaped like a hub id.
    """
    known = (
        f"valid: {', '.join(ALIASES)}, a folder in transformers' format, a GGUF file, a hub id owner/name, "
        "owner/name:file.gguf or owner/name:Q4_K_M"
    )
    if not name or "\0" in name:
        raise InputError(f"model is {name!r}; {known}")
    path = Path(name).expanduser()
    if name in ALIASES or gguf_in(path) is not None:
        return
    if path.is_dir():
        if (path / ADAPTER).is_file():
            raise InputError(f"model folder {name} holds an adapter ({ADAPTER}); valid: {MERGED}")
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name} has no config.json and no GGUF file; {known}")
    elif path.exists():
        raise InputError(f"model {name} is a file, but not a GGUF file; {known}")
    elif GGUF_FILE.fullmatch(name) and ".." not in name:
        return
    elif not HUB_ID.fullmatch(name) or ".." in name or path.suffix == ".gguf":
        what = "no such folder" if "/" in name or name.startswith((".", "~")) else "unknown name"
        what = "no such file" if path.suffix else what
        raise InputError(f"model is {name!r}: {what}; {known}")


#: names the EAGLE-3 drafter that comes with the package, for the default model
SHIPPED = "shipped"


def check_eagle(name: str) -> None:
    """What can be said of an EAGLE-3 drafter's name without asking the hub; light.

    Raises:
        InputError: neither "auto", "none" or "shipped", nor a folder or file that is there, nor shaped like a
            hub id.
    """
    if name in ("auto", "none", SHIPPED):
        return
    there = bool(name) and "\0" not in name and Path(name).expanduser().exists()
    shaped = HUB_ID.fullmatch(name) or GGUF_FILE.fullmatch(name)
    if not there and (not shaped or ".." in name):
        raise InputError(
            f"eagle is {name!r}: no such folder or file; valid: a folder or GGUF file of an EAGLE-3 drafter, "
            "a hub id owner/name, owner/name:file.gguf, auto, none, or shipped",
            "eagle",
        )


def locate(name: str) -> Path:
    """The folder or GGUF file of a model (of a split one the first part); what is not here yet is fetched.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a hub's model that can be fetched.
    """
    check_name(name)
    if name in ALIASES:
        found = default_model.ensure(cache_dir())
        return default_model.draft_file() if name == default_model.DRAFT else found
    path = Path(name).expanduser()
    return path if path.is_dir() or path.is_file() else fetch(name)


READABLE = "a public model, one that your token may read, a local folder, or a GGUF file"
TIMEOUT = 8  # seconds in which the hub has to answer; what is here is taken where it does not
#: what a model's folder needs besides weights, by the end of the file's name
NEEDED = (".json", ".txt", ".model", ".jinja")
ADAPTER = "adapter_config.json"
#: files that are weights a second time
TWICE = ("consolidated", "pytorch_model.bin.index", "tf_model", "flax_model")

logger = logging.getLogger("tokenswift")


def fetch(name: str) -> Path:
    """The folder or GGUF file of a hub's model, of its newest version; what is missing is fetched. Where the
    hub does not answer, or is switched off, what its local cache has will do.

    The announcement is a WARNING of the logger ``tokenswift``; the hub's bars are shown where that is.

    Args:
        name: ``owner/name``, or with ``:FILE``: its path in the repository, or the format in its name, such
            as ``Q4_K_M``.
    Raises:
        InputError: there is no such model or file, or it must not or cannot be fetched.
    """
    from huggingface_hub import HfApi

    repository, _, file = name.partition(":")
    with refused_as(f"model {name} cannot be fetched from the hub", READABLE):
        try:
            entries = HfApi().model_info(repository, timeout=TIMEOUT).siblings or ()
        except Exception:  # the HTTP library differs between versions, and so do its errors
            if (there := cached(name)) is None:
                raise
            return there
        wanted = _files_of(repository, file, [entry.rfilename for entry in entries])
        folder = _fetched(repository, wanted)
    return folder / wanted[0] if file else folder


def cached(name: str) -> Path | None:
    """What :func:`fetch` returns, where all of it is in the hub's local cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repository, _, file = name.partition(":")
    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    try:
        folder = kept / "snapshots" / (kept / "refs" / "main").read_text()
        there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        files = _files_of(repository, file, there)
    except (OSError, InputError):
        return None
    return (folder / files[0] if file else folder) if set(files) <= set(there) else None


def _files_of(name: str, file: str, there: Sequence[str]) -> list[str]:
    """The files of a repository that are meant by a path or a format; those of a checkpoint where it is "".

    Raises:
        InputError: there is none, or several models.
    """
    if file:
        return _ggufs_of(name, file, there)
    wanted = wanted_files(there)
    if (files := _gguf(there)) and not any(one.endswith((".safetensors", ".bin")) for one in wanted):
        raise InputError(f"model {name} on the hub has GGUF files; valid: {name}:FILE with one of {files}")
    if ADAPTER in there:
        raise InputError(f"model {name} on the hub holds an adapter ({ADAPTER}); valid: {MERGED}")
    if "config.json" not in wanted:
        raise InputError(f"model {name} on the hub has no config.json; valid: a transformers checkpoint")
    return wanted


def _ggufs_of(name: str, wanted: str, there: Sequence[str]) -> list[str]:
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


def _fetched(name: str, wanted: list[str]) -> Path:
    """The folder of a hub model in the local cache, once these files are there."""
    from huggingface_hub import snapshot_download

    plan: Any = snapshot_download(name, allow_patterns=wanted, dry_run=True)
    missing = [file for file in plan if file.will_download]
    if missing:
        files = missing[0].filename if len(missing) == 1 else counted(len(missing), "file")
        megabytes = sum(file.file_size or 0 for file in missing) / 1e6
        logger.warning("fetching %s from the hub: %s, %.1f MB", name, files, megabytes)
    with _bars(bool(missing)):
        return Path(snapshot_download(name, allow_patterns=wanted))


@contextmanager
def refused_as(what: str, valid: str = "") -> Iterator[None]:
    """Inside the block, what a library trips over is bad input: the errors of those of models are their own,
    and `tokenizers` panics, which is no Exception.

    Raises:
        InputError: ``what``, what the library says, and what is valid.
    """
    try:
        yield
    except (InputError, RunError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise InputError(f"{what} ({line_of(error)}){valid and f'; valid: {valid}'}") from error


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
