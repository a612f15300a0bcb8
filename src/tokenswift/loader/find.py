"""From a model's name to its files: the default model, local folders, GGUF files and hub ids.

Light: no torch in here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tokenswift.loader.default_model import DEFAULT, DRAFT, cache_dir, draft_file
from tokenswift.loader.errors import refused_as
from tokenswift.loader.fetch import fetch_named
from tokenswift.loader.named_models import NAMED_MODELS
from tokenswift.loader.parts import GGUF_END, first_parts, part_names
from tokenswift.types import InputError, OnProgress

logger = logging.getLogger("tokenswift")
ALIASES = (*NAMED_MODELS, DRAFT)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: a repository's file, in a folder of it perhaps, or what its name says of its format, such as
#: Q4_K_M
GGUF_FILE = re.compile(rf"({HUB_ID.pattern}):([\w.+-]+(?:/[\w.+-]+)*)")
#: the file that makes a folder an adapter of PEFT, and what is valid in its place
ADAPTER = "adapter_config.json"
MERGED = "the model that it was merged into (PEFT's merge_and_unload, then save_pretrained)"
#: folders of the hub's local cache: of a repository, and in it; those named by digests
CACHED = "models--"
HASHED = re.compile(r"[0-9a-f]{32,}|snapshots|blobs")
#: names the EAGLE-3 drafter that comes with the package, for the default model
SHIPPED = "shipped"
HEADS = ".heads.safetensors"  # how files of draft heads end
DRAFTERS = ("auto", "none", SHIPPED)


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights;
    light. Of a model in several parts it is the first one.

    Raises:
        InputError: a folder holds several models.
    """
    if path.is_file():
        return path if path.name.lower().endswith(GGUF_END) else None
    files = sorted(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    models = first_parts([file for file in files if file.lower().endswith(GGUF_END)])
    if not models or any(file.endswith((".safetensors", ".bin", ".index.json")) for file in files):
        return None
    if len(models) > 1:
        names = ", ".join(models[:3])
        raise InputError(
            f"model folder {path} holds {len(models)} GGUF models ({names}); valid: one of them"
        )
    return path / models[0]


def short_name(model: str) -> str:
    """What a model is called for others than the one who loaded it: the name of its folder or file,
    ``owner/name`` of a snapshot in the hub's local cache, and never a digest.

    Args:
        model: what it was loaded by.
    """
    parts = [part for part in Path(model).absolute().parts if not HASHED.fullmatch(part)]
    name = parts[-1]
    if name.startswith(CACHED):
        return name.removeprefix(CACHED).replace("--", "/", 1)
    return name


def check_name(name: str, option: str = "model") -> None:
    """What can be said of a model's name, or of an EAGLE-3 drafter's, without asking the hub;
    light.

    Args:
        option: "model" or "eagle".
    Raises:
        InputError: neither a word that is known, nor a folder or file that is there, nor shaped
            like a hub's.
    """
    plain = HUB_ID.fullmatch(name) and not name.endswith(".gguf")
    of_hub = bool(plain or GGUF_FILE.fullmatch(name)) and ".." not in name
    words = ALIASES if option == "model" else DRAFTERS
    wrong = f"{option} is {name!r}: no such folder or file"
    valid = name in words or of_hub
    if not valid and name and "\0" not in name and (path := Path(name).expanduser()).exists():
        valid = option != "model" or path.is_dir() or gguf_in(path) is not None
        wrong = f"model {name} is a file, but not a GGUF file"
    if not valid:
        raise InputError(
            f"{wrong}; valid: {', '.join(words)}, a folder in transformers' format, a GGUF file, "
            f"a hub id "
            "owner/name, owner/name:file.gguf or owner/name:Q4_K_M",
            option,
        )


def locate(name: str, on_progress: OnProgress | None = None) -> Path:
    """The folder or GGUF file of a model; what is not here yet is fetched.

    Args:
        on_progress: called with the stage "fetch", where a model of :data:`ALIASES` is.
    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a hub's model that can be
            fetched.
    """
    check_name(name)
    if name in ALIASES:
        model = NAMED_MODELS[DEFAULT if name == DRAFT else name]
        file = fetch_named(model, cache_dir(), on_progress)
        return draft_file() if name == DRAFT else file.parent
    path = Path(name).expanduser()
    return path if path.exists() else fetch(name)


# ---- the hub -------------------------------------------------------------------------------------

READABLE = "a public model, one that your token may read, a local folder, or a GGUF file"
TIMEOUT = 8  # seconds in which the hub has to answer; what is here is taken where it does not
#: what a model's folder needs besides weights, by the end of the file's name
NEEDED = (".json", ".txt", ".model", ".jinja")
#: ends of the names of files of weights
WEIGHTS = (".safetensors", ".bin")
#: files that are weights a second time
TWICE = ("consolidated", "pytorch_model.bin.index", "tf_model", "flax_model")


def fetch(name: str) -> Path:
    """The folder or GGUF file of a hub's model, of its newest version; what is missing is fetched.
    Where the hub does not answer, or is switched off, what its local cache has will do.

    The announcement is a WARNING of the logger ``tokenswift``; the bars are the hub's.

    Args:
        name: ``owner/name``, or with ``:FILE``: its path in the repository, or the format in its
            name, such as ``Q4_K_M``.
    Raises:
        InputError: there is no such model or file, or it must not or cannot be fetched.
    """
    from huggingface_hub import HfApi, snapshot_download

    repository, _, file = name.partition(":")
    with refused_as(f"model {name} cannot be fetched from the hub", READABLE):
        try:
            info = HfApi().model_info(repository, timeout=TIMEOUT)
        except Exception:  # the HTTP library differs between versions, and so do its errors
            if (there := cached(name)) is None:
                raise
            return there
        wanted = _files_of(repository, file, [entry.rfilename for entry in info.siblings or ()])
        folder = _snapshot(repository)
        if (
            folder is None
            or folder.name != info.sha
            or not all((folder / one).is_file() for one in wanted)
        ):
            logger.warning("fetching %s from the hub", name)
            folder = Path(snapshot_download(repository, allow_patterns=wanted))
    return folder / wanted[0] if file else folder


def _snapshot(repository: str) -> Path | None:
    """The newest version of a repository in the hub's local cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    newest = folder / "refs" / "main"
    return folder / "snapshots" / newest.read_text() if newest.is_file() else None


def cached(name: str) -> Path | None:
    """What :func:`fetch` returns, where it is in the hub's local cache."""
    repository, _, file = name.partition(":")
    if (folder := _snapshot(repository)) is None:
        return None
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        return folder / _files_of(repository, file, there)[0] if file else folder
    except InputError:
        return None


def _files_of(name: str, file: str, there: Sequence[str]) -> list[str]:
    """The files of a repository that are meant by a path or a format; those of a checkpoint where
    it is "".

    Raises:
        InputError: there is none, or several models.
    """
    if file:
        return _ggufs_of(name, file, there)
    wanted = wanted_files(there)
    if ADAPTER in there and "config.json" not in there:
        raise InputError(f"model {name} on the hub holds an adapter; valid: {MERGED}")
    if "config.json" not in wanted or not any(one.endswith(WEIGHTS) for one in wanted):
        listed = ", ".join(_gguf_models(there)[:12])
        ways = f"{name}:FILE with one of {listed}" if listed else "one with config.json and weights"
        raise InputError(f"model {name} on the hub is no checkpoint of transformers; valid: {ways}")
    return wanted


def _gguf_models(there: Sequence[str]) -> list[str]:
    """The GGUF models of a repository, each by its file, or by the first of its parts."""
    return first_parts([one for one in there if one.lower().endswith(GGUF_END)])


def _ggufs_of(name: str, file: str, there: Sequence[str]) -> list[str]:
    """The files of a repository's GGUF model, all of its parts in order.

    Args:
        name: the repository.
        file: a path in it, of any part, or a format in the file's name.
        there: the repository's files.
    Raises:
        InputError: there is none, or several models, or a part is missing.
    """
    models = _gguf_models(there)
    named = re.compile(rf"(?:^|.*[-./]){re.escape(file)}(?:[-./].*)?\.gguf", re.IGNORECASE)
    wanted = [one for one in models if named.fullmatch(one) and "mmproj" not in one]
    if file in there and file.lower().endswith(GGUF_END):
        wanted = [file]
    if len(wanted) != 1:
        what = "several files" if wanted else "no file"
        valid = ", ".join((wanted or models)[:12]) or "a model with GGUF files"
        raise InputError(f"model {name} on the hub has {what} {file}; valid: {valid}")
    parts = part_names(wanted[0])
    if missing := [one for one in parts if one not in there]:
        raise InputError(
            f"model {name} on the hub lacks {missing[0]}, one of the {len(parts)} parts of "
            f"{wanted[0]}; valid: a model with all of its parts"
        )
    return parts


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that a transformers model needs: configuration, tokenizer, weights
    once."""
    top = [name for name in names if "/" not in name and not name.startswith(TWICE)]
    safe = [name for name in top if name.endswith(".safetensors")]
    weights = safe or [name for name in top if name.startswith("pytorch_model")]
    return sorted({name for name in top if name.endswith(NEEDED)} | set(weights))
