"""The models in the caches: ours (`loader.find.cache_dir`) and the hub's.

Nothing outside of the two folders is counted or removed: links are neither followed nor taken for models,
and the hub's folder is scanned and emptied by its own library, a whole repository at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenswift.loader.default_model import lock
from tokenswift.loader.find import ALIASES, cache_dir
from tokenswift.types import InputError, RunError

OWN, HUB = "tokenswift", "hub"
#: what else our cache holds, made again when it is needed
BESIDE = {"kernels": "compiled kernels", "costs": "measured costs"}


@dataclass(frozen=True, slots=True)
class Cached:
    """A model in a cache.

    Attributes:
        name: as ``LLM`` and ``--model`` take it.
        cache: :data:`OWN` or :data:`HUB`.
        kept: what is removed with it: a name of ours, or a repository of the hub.
        path: a folder in transformers' format, or a GGUF file.
        nbytes: of its files.
    """

    name: str
    cache: str
    kept: str
    path: Path
    nbytes: int


def hub_dir() -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def models() -> tuple[list[Cached], list[str]]:
    """The models of both caches by name, and what of the hub's cache cannot be read, a line each."""
    own, (found, faults) = cache_dir(), _scanned()
    made = [
        Cached(name, OWN, name, own / name, size_of(own / name)) for name in ALIASES if _is_there(own / name)
    ]
    made += [one for repo in _repositories(found) for one in _in_repository(repo)]
    return sorted(made, key=lambda one: one.name.lower()), faults


def beside() -> dict[str, int]:
    """Bytes of what else is in our cache, by :data:`BESIDE`'s names of folders."""
    return {name: size_of(cache_dir() / name) for name in BESIDE if _is_there(cache_dir() / name)}


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; what links lead to is not in it."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
        if not os.path.islink(os.path.join(place, name))
    )


def check_removable(name: str) -> str:
    """What :func:`remove` would remove, by its name.

    Raises:
        InputError: neither cache has it, or a link stands in its place.
    """
    if name in ALIASES and os.path.islink(cache_dir() / name):
        raise InputError(
            f"name is {name!r}: {cache_dir() / name} is a link; valid: what is in the cache itself"
        )
    found = sorted(
        {one.kept for one in models()[0]} | {repo.repo_id for repo in _repositories(_scanned()[0])}
    )
    if name not in found:
        file = next((one.kept for one in models()[0] if one.name == name), None)
        valid = file or ", ".join(found) or "none, the caches hold no model"
        raise InputError(f"name is {name!r}; valid: {valid}")
    return name


def remove(name: str) -> int:
    """Remove a model of ours, or a repository of the hub with all that was fetched of it.

    Returns:
        The bytes that were freed.
    Raises:
        InputError: as of :func:`check_removable`.
        RunError: not all of it could be removed.
    """
    check_removable(name)
    if name in ALIASES:
        folder = cache_dir() / name
        with lock(folder, "removing it needs no room"):
            before = size_of(folder)
            _without(folder)
            return before
    found, _ = _scanned()
    repo = next(repo for repo in _repositories(found) if repo.repo_id == name)
    before = size_of(hub_dir())
    # of this repository alone: two may have revisions of one name, and the first one found would go
    alone = replace(found, repos=frozenset([repo]))
    alone.delete_revisions(*(one.commit_hash for one in repo.revisions)).execute()
    if os.path.lexists(repo.repo_path):
        raise RunError(f"{repo.repo_path} could not be removed completely; valid: a writable folder")
    return before - size_of(hub_dir())


def _without(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RunError(
            f"{folder} could not be removed completely ({error.strerror or error}); valid: a writable folder"
        ) from error


def _is_there(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()


def _scanned() -> tuple[Any, list[str]]:
    """What the hub's library finds in its cache; None where there is none."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(hub_dir())
    except (CacheNotFound, ValueError):
        return None, []
    except OSError as error:
        return None, [f"{hub_dir()} cannot be read ({error.strerror or error})"]
    return found, sorted(" ".join(str(one).split()) for one in found.warnings)


def _repositories(found: Any) -> list[Any]:
    """The repositories of models in a scan, those that are links aside."""
    repos = () if found is None else found.repos
    return [repo for repo in repos if repo.repo_type == "model" and _is_there(repo.repo_path)]


def _in_repository(repo: Any) -> Iterator[Cached]:
    """The models of a repository's revision that its name stands for: a checkpoint, and each GGUF file."""
    if not repo.revisions:
        return
    newest = max(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
    folder = newest.snapshot_path
    inside = hub_dir().resolve()
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.resolve().is_relative_to(inside) and path.is_file()
    }
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    for name in ggufs:
        yield Cached(f"{repo.repo_id}:{name}", HUB, repo.repo_id, files[name], files[name].stat().st_size)
    if "config.json" in files:
        sizes = [path.stat().st_size for name, path in files.items() if name not in ggufs]
        yield Cached(repo.repo_id, HUB, repo.repo_id, folder, sum(sizes))
