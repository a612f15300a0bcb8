"""What can be known of devices and models before anything is loaded; light: no torch in here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenswift.cli.version import cuda_count
from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader import draft, embedded
from tokenswift.loader.shipped import has_rivals, weights, where
from tokenswift.types import InputError

METADATA_KEY = "tokenswift_heads"
MOST_HEADER = 1 << 20  # bytes


def check_there(device: str) -> None:
    """Refuse CUDA devices that are not there, as `loader.load.check_place` does once torch is loaded.

    Raises:
        InputError: the driver or torch says that there are none, or fewer.
    """
    count = cuda_count() if device.startswith("cuda") else None
    if count is None:  # not asked for, or only torch can tell
        return
    if not count:
        raise InputError(f"device is {device!r}, but no CUDA device is available here; valid: auto, cpu")
    if ":" in device and int(device.partition(":")[2]) >= count:
        raise InputError(f"device is {device!r}; valid: cuda:0 to cuda:{count - 1}")


def check_drafts(strategy: str, model: str, heads: str, draft_model: str | None) -> None:
    """Refuse a strategy that has nothing to draft with, where the model's config.json is enough to tell.

    Raises:
        InputError: triforce without a draft model, or medusa without heads, for a model that none are
            shipped for.
    """
    if strategy == "triforce" and draft_model is None and not _may_be_shipped_for(model, None):
        raise InputError(
            "draft_model is not given; valid: a causal LM with the target's tokenizer, such as a folder of "
            "train-draft"
        )
    shipped = heads in ("auto", "medusa") and _may_be_shipped_for(model, "medusa")
    if strategy == "medusa" and heads in ("auto", "medusa", "none") and not shipped:
        raise InputError(
            f"strategy medusa needs heads of kind medusa, and --heads is {heads!r}; valid: --heads FILE from "
            f"tokenswift train-heads --kind medusa{where()}"
        )


def _may_be_shipped_for(model: str, kind: str | None) -> bool:
    """Whether heads of a kind (None: any) may be shipped for a model; True where that cannot be told."""
    if model == embedded.NAME:
        return kind != "medusa" or has_rivals()
    path = Path(model).expanduser() / "config.json"
    if model == draft.NAME or not path.is_file():
        return model != draft.NAME
    try:
        config = object_in(path, MOST_CONFIG, f"model {model}")
        sizes = config["hidden_size"], config["vocab_size"]
    except (InputError, KeyError):  # loading it will say what is wrong, or know better
        return True
    return any(
        (found.get("hidden_size"), found.get("vocab_size")) == sizes and kind in (None, found.get("kind"))
        for found in _shipped()
    )


def _shipped() -> list[dict[str, Any]]:
    """The configurations of the shipped heads, from the headers of their files."""
    found = []
    for entry in weights(".heads.safetensors"):
        with entry.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, MOST_HEADER)))
        found.append(json.loads(header["__metadata__"][METADATA_KEY]).get("heads", {}))
    return found
