"""What has to be the same for a run to go on; see `tokenswift.loader.identity`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenswift.config import shown
from tokenswift.types import InputError

#: how a difference is named
NAMES = {
    "dtype": "dtype",
    "activations": "activations",
    "kv_cache_dtype": "kv_cache_dtype",
    "config": "the model's config",
    "weights": "the model's weights",
    "adapter": "the adapter",
    "tokenizer": "the tokenizer",
    "rope": "rope_scaling",
    "prompt": "the prompt",
    "eos": "the end-of-text tokens (ignore_eos)",
    "stop": "stop",
    "acceptance": "acceptance",
}


def check_same(folder: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """See that a run may go on.

    Args:
        folder: the run's, for the message.
        kept, now: what the journal says and what is at hand.
    Raises:
        InputError: naming everything that differs, with both values where they are short.
    """
    kept, now = (
        {
            **each,
            "activations": each.get("activations") or "float",
            "kv_cache_dtype": each.get("kv_cache_dtype") or "auto",
        }
        for each in (kept, now)
    )
    found = []
    for key in kept.keys() | now.keys():
        a, b = kept.get(key), now.get(key)
        if a == b or (key == "weights" and kept.get("dtype") != now.get("dtype")):
            continue  # other values in another dtype: said once
        if key == "stored":
            continue  # a file's name and format: the weights' values decide
        if key == "sampling" and isinstance(a, dict) and isinstance(b, dict):
            found += [f"{k} is {shown(b.get(k))}, was {shown(v)}" for k, v in a.items() if b.get(k) != v]
        elif key in ("dtype", "activations", "kv_cache_dtype", "acceptance", "stop", "eos", "rope"):
            found.append(f"{NAMES[key]} is {shown(b)}, was {shown(a)}")
        else:
            found.append(f"{NAMES.get(key, key)} differs")
    if found:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(sorted(found))}; valid: what the run "
            f"began with, or another folder"
        )
