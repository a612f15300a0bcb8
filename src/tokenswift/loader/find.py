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

from tokenswift.files import line_of
from tokenswift.loader import default_model
from tokenswift.types import InputError, RunError, counted


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights; light.

    Raises:
        InputError: a folder holds several.
    """
    if path.is_file():
        return path if path.name.lower().endswith(".gguf") else None
    files = sorted(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    found = [file for file in files if file.lower().endswith(".gguf")]
    if not found or any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
        return None
    if len(found) > 1:
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
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name} has no config.json and no GGUF file; {known}")
    elif path.exists():
        raise InputError(f"model {name} is a file, but not a GGUF file; {known}")
    elif GGUF_FILE.fullmatch(name) and ".." not in name:
        return
    elif not HUB_ID.fullmatch(name) or ".." in name or path.suffix == ".gguf":
        raise InputError(f"model is {name!r}: no such folder or file; {known}")


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
#: files that are weights a second time
TWICE = ("consolidated", "pytorch_model.bin.index", "tf_model", "flax_model")

logger = logging.getLogger("tokenswift")


def fetch(name: str) -> Path:
    """The folder or GGUF file of a hub's model, of its newest version; what is missing is fetched. Where the
    hub does not answer, or is switched off, what its local cache has will do.

    The announcement is a WARNING of the logger ``tokenswift``; the bars are the hub's.

    Args:
        name: ``owner/name``, or with ``:FILE``: its path in the repository, or the format in its name, such
            as ``Q4_K_M``.
    Raises:
        InputError: there is no such model or file, or it must not or cannot be fetched.
    """
    from huggingface_hub import HfApi, snapshot_download

    repository, _, file = name.partition(":")
    with refused_as(f"model {name} cannot be fetched from the hub", READABLE):
        try:
            info = HfApi().model_info(repository, timeout=TIMEOUT, files_metadata=True)
        except Exception:  # the HTTP library differs between versions, and so do its errors
            if (there := cached(name)) is None:
                raise
            return there
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
        wanted = _files_of(repository, file, list(sizes))
        folder = _kept(repository) / "snapshots" / str(info.sha)
        if missing := [one for one in wanted if not (folder / one).is_file()]:
            files = missing[0] if len(missing) == 1 else counted(len(missing), "file")
            megabytes = sum(sizes[one] for one in missing) / 1e6
            logger.warning("fetching %s from the hub: %s, %.1f MB", repository, files, megabytes)
            folder = Path(snapshot_download(repository, allow_patterns=wanted))
    return folder / wanted[0] if file else folder


def _kept(repository: str) -> Path:
    """The folder of a repository in the hub's local cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def cached(name: str) -> Path | None:
    """What :func:`fetch` returns, where all of it is in the hub's local cache."""
    repository, _, file = name.partition(":")
    kept = _kept(repository)
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
    if "config.json" not in wanted:
        raise InputError(f"model {name} on the hub has no config.json; valid: a transformers checkpoint")
    return wanted


def _ggufs_of(name: str, wanted: str, there: Sequence[str]) -> list[str]:
    ggufs = [file for file in there if file.lower().endswith(".gguf")]
    found = [wanted] if wanted in ggufs else []
    if not found and not wanted.lower().endswith(".gguf"):
        named = re.compile(rf"(?:^|.*[-./]){re.escape(wanted)}(?:[-./].*)?\.gguf", re.IGNORECASE)
        found = [file for file in ggufs if named.fullmatch(file) and "mmproj" not in file]
    if len(found) != 1:
        what = f"several files {wanted}" if found else f"no file {wanted}"
        valid = _gguf(found or there) or "a model with GGUF files"
        raise InputError(f"model {name} on the hub has {what}; valid: {valid}")
    return found


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
    return ", ".join(sorted(file for file in files if file.lower().endswith(".gguf"))[:12])


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that a transformers model needs: configuration, tokenizer, weights once."""
    top = [name for name in names if "/" not in name and not name.startswith(TWICE)]
    safe = [name for name in top if name.endswith(".safetensors")]
    weights = safe or [name for name in names if "/" not in name and name.startswith("pytorch_model")]
    return sorted({name for name in top if name.endswith(NEEDED)} | set(weights))
