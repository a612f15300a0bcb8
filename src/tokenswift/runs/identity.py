"""What has to be the same for a run to go on: the identity of model, adapter and tokenizer, in digests.

Reading 16 GB of weights before every resume would take longer than the prefill, so weights are sampled: of
every parameter its name, shape and type, and 64 values in four places. Training changes nearly every value of
the parameters that it touches; a change of single values can go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from tokenswift.config import shown
from tokenswift.types import InputError
from tokenswift.version import __version__

PLACES, RUN = 4, 16  # of a weight
#: parts of a config that say where a model came from or what it runs on, not what it is
ASIDE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")

#: how a difference is named
NAMES = {
    "dtype": "dtype",
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


def _digest(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
        made.update(b"\0")
    return made.hexdigest()[:32]


def _values(weight: Tensor) -> bytes:
    """Values of a weight at fixed places, as bytes."""
    flat = weight.detach().reshape(-1)
    starts = [(flat.numel() - RUN) * i // max(PLACES - 1, 1) for i in range(PLACES)]
    if flat.numel() <= PLACES * RUN:
        taken = flat
    else:
        taken = torch.cat([flat[start : start + RUN] for start in starts])
    return taken.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of sampled weights, by name and in the order of their names."""
    return _digest(
        part
        for name, weight in named
        for part in (name.encode(), str((tuple(weight.shape), str(weight.dtype))).encode(), _values(weight))
    )


def identity_of(model: Any) -> dict[str, Any]:
    """The identity of a loaded transformers causal LM, before anything takes its weights.

    Returns:
        dtype, digests of config and sampled weights, and the adapter: None, or the names of the adapters
        that PEFT attached with a digest of their settings and sampled weights.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in ASIDE}
    attached = getattr(model, "peft_config", None) or {}
    names = [str(name) for name in attached] if isinstance(attached, Mapping) else []
    own: list[tuple[str, Tensor]] = []
    added: list[tuple[str, Tensor]] = []
    for name, weight in model.named_parameters():
        (added if _of_adapter(name, names) else own).append((name, weight))
    adapter = None
    if names:
        settings = [f"{name} {_plain(attached[name])}".encode() for name in sorted(names)]
        try:
            active = getattr(model, "active_adapters", None)
            active = active() if callable(active) else active
        except ValueError:  # transformers asks for PEFT, and none is active
            active = None
        adapter = {
            "names": sorted(names),
            "digest": _digest(
                [*settings, str(active).encode(), weights_digest(sorted(added, key=_name)).encode()]
            ),
        }
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": _digest([json.dumps(config, sort_keys=True, default=str).encode()]),
        "weights": weights_digest(sorted(own, key=_name)),
        "adapter": adapter,
    }


def _name(pair: tuple[str, Tensor]) -> str:
    return pair[0]


def _of_adapter(name: str, adapters: list[str]) -> bool:
    """Whether a parameter belongs to an adapter: PEFT names them ``….lora_A.NAME.weight``."""
    return any(f".{adapter}." in f"{name}." for adapter in adapters)


def _plain(settings: Any) -> str:
    """An adapter's settings as text."""
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    return json.dumps(settings, sort_keys=True, default=lambda value: type(value).__name__)


def tokenizer_digest(tokenizer: Any) -> str | None:
    """A digest of what a tokenizer does; None without one."""
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return _digest([fast.to_str().encode("utf-8", errors="surrogatepass")])
    return _digest([json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()])


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "tokenswift": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
    }


def check_same(folder: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """See that a run may go on.

    Args:
        folder: the run's, for the message.
        kept, now: what the journal says and what is at hand.
    Raises:
        InputError: naming everything that differs, with both values where they are short.
    """
    found = []
    for key in kept.keys() | now.keys():
        a, b = kept.get(key), now.get(key)
        if a == b or (key == "weights" and kept.get("dtype") != now.get("dtype")):
            continue  # other values in another dtype: said once
        if key == "sampling" and isinstance(a, dict) and isinstance(b, dict):
            found += [f"{k} is {shown(b.get(k))}, was {shown(v)}" for k, v in a.items() if b.get(k) != v]
        elif key in ("dtype", "acceptance", "stop", "eos", "rope"):
            found.append(f"{NAMES[key]} is {shown(b)}, was {shown(a)}")
        else:
            found.append(f"{NAMES.get(key, key)} differs")
    if found:
        raise InputError(
            f"run_dir {folder} holds another run: {'; '.join(sorted(found))}; valid: what the run "
            f"began with, or another folder"
        )
