"""From a model's name to its files: aliases, local folders, GGUF files and hub ids.

The cache folder is ``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenswift.loader import draft, embedded, hub
from tokenswift.loader.gguf import MERGED, gguf_in
from tokenswift.loader.hub import ADAPTER
from tokenswift.types import InputError, OnProgress

ALIASES = (embedded.NAME, draft.NAME)
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
        InputError: neither "shipped", nor a folder or file that is there, nor shaped like a hub id.
    """
    if name == SHIPPED:
        return
    there = bool(name) and "\0" not in name and Path(name).expanduser().exists()
    shaped = HUB_ID.fullmatch(name) or GGUF_FILE.fullmatch(name)
    if not there and (not shaped or ".." in name):
        raise InputError(
            f"eagle is {name!r}: no such folder or file; valid: a folder or GGUF file of an EAGLE-3 drafter, "
            "a hub id owner/name, owner/name:file.gguf, or shipped",
            "eagle",
        )


def locate(name: str, on_progress: OnProgress | None = None) -> tuple[str, bool]:
    """Where a name's files are: (folder, GGUF file or hub id, whether only local files may be used).

    Models that are not here yet are fetched.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a hub id that can be reached.
    """
    found = _at_hand(name, on_progress)
    if found is None:
        asked = GGUF_FILE.fullmatch(name)
        return (hub.fetch(name) if asked is None else hub.fetch_file(*asked.groups())), True
    return found, True


@contextmanager
def header_of(name: str) -> Iterator[tuple[str, bool]]:
    """:func:`locate` for who needs a config or the header of a GGUF file alone: of a hub's model that is not
    here, no weights are fetched. A file that was cut off behind its header is gone after the block."""
    found, asked = _at_hand(name), GGUF_FILE.fullmatch(name)
    if found is not None or asked is None:
        yield found or name, found is not None
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        path.write_bytes(hub.header(*asked.groups()))
        yield str(path), True


def _at_hand(name: str, on_progress: OnProgress | None = None) -> str | None:
    """What :func:`locate` finds without fetching a hub's model; None where that can be fetched."""
    check_name(name)
    if name in ALIASES:
        return str((draft if name == draft.NAME else embedded).ensure(cache_dir(), on_progress))
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return str(path)
    reason, asked = hub.answers(), GGUF_FILE.fullmatch(name)
    if reason is None:
        return None
    there = hub.cached_file(name, "config.json") if asked is None else hub.cached_gguf(*asked.groups())
    if there is not None:
        return name if asked is None else there
    raise InputError(
        f"model is {name!r}: {reason}, and there is no such local folder; "
        f"valid without the hub: {', '.join(ALIASES)}, a folder in transformers' format, or a GGUF file"
    )
