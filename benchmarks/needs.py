"""What rows need beside their model: heads, EAGLE-3 drafters and draft models, where they are, and the
command that gets them.

Light: no torch in here. Heads that a configuration names by kind are the shipped ones of the default model,
and of any other model a file of that kind in the working folder, ``NAME.KIND.heads.safetensors``.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenswift.config import HEAD_KINDS
from tokenswift.loader import default_model
from tokenswift.loader.find import SHIPPED
from tokenswift.types import InputError

#: strategy → the kind of heads that it drafts with
HEADS_OF = {"auto": "conditioned", "tokenswift": "conditioned", "medusa": "medusa"}


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


#: ways to run TokenSwift by name (see the file), and the paper's models by hub id
METHODS, MODELS = _read("methods.toml"), _read("models.toml")
#: real models by name: the packages that hold them, and their SHA-256
FETCHED = MODELS.pop("fetched")


class Need(NamedTuple):
    """Heads, an EAGLE-3 drafter or a draft model.

    Attributes:
        what: in words.
        place: "shipped", a file, a folder or a hub id.
        command: what gets it; "" where it is there, or comes from the hub by itself.
    """

    what: str
    place: str
    command: str

    def __str__(self) -> str:
        return f"{self.what}: {self.place}" + (f" is missing, run: {self.command}" if self.command else "")


def of_model(model: str, strategy: str, settings: Mapping[str, Any], named: bool) -> dict[str, Any]:
    """A row's settings for its model: which draft model, and, where ``named``, which heads and sampler.

    Args:
        settings: of the spec, the variant and the command; what they say stays.
        named: heads are named by kind, so that no row runs without any unsaid.
    """
    known, made = MODELS.get(model, {}), dict(settings)
    if named:
        made = {"sampler": known["sampler"], **made} if "sampler" in known else made
        if made.get("heads", "auto") == "auto" and strategy in HEADS_OF:
            made["heads"] = HEADS_OF[strategy]
    if made.get("eagle") == "own":
        made["eagle"] = SHIPPED if model == default_model.NAME else f"{Path(model).name}.eagle.gguf"
    if made.get("draft_model") == "standalone":
        made["draft_model"] = known.get("standalone", default_model.DRAFT)
    elif strategy == "triforce" and known:
        made.setdefault("draft_model", known.get("draft", f"{Path(model).name}.draft"))
    return made


def heads_place(config: Mapping[str, Any]) -> str:
    """What a row's model is to be loaded with as ``heads``."""
    heads, model = config["heads"], config["model"]
    file = Path(f"{Path(model).name}.{heads}.heads.safetensors")
    if heads == "linear" and not file.is_file() and (published := MODELS.get(model, {}).get("linear")):
        return published
    own = heads in HEAD_KINDS and model != default_model.NAME and (file.is_file() or model in MODELS)
    return str(file) if own else heads


def needs(config: Mapping[str, Any]) -> list[Need]:
    """What a row needs, in order; what is missing has a command."""
    model, strategy, found = config["model"], config["strategy"], list[Need]()
    place, kind = heads_place(config), config["heads"]
    if strategy in HEADS_OF and kind != "none":
        what = f"{kind} heads" if kind in HEAD_KINDS else "heads"
        missing = place.endswith(".safetensors") and kind in HEAD_KINDS and not Path(place).exists()
        shipped = place in HEAD_KINDS or (place == "auto" and model == default_model.NAME)
        command = _heads_command(model, kind, place) if missing else ""
        found.append(Need(what, "shipped" if shipped else place, command))
    if (eagle := config.get("eagle")) is not None:
        missing = eagle == f"{Path(model).name}.eagle.gguf" and not Path(eagle).exists()
        command = (
            f"tokenswift train --kind eagle {_text(model)} --out {shlex.quote(eagle)}" if missing else ""
        )
        found.append(Need("EAGLE-3 drafter", eagle, command))
    small = config["options"].get("draft_model")
    if small is not None or strategy == "triforce":
        own = f"{Path(model).name}.draft"
        missing = small == own and not Path(own).exists()
        command = f"tokenswift train --kind draft {_text(model)} --layers 2 --out {small}" if missing else ""
        found.append(Need("draft model", str(small or default_model.DRAFT), command))
    return found


def check_needs(config: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` with the command that gets what is missing."""
    for need in needs(config):
        if need.command:
            raise InputError(str(need))


def none_shipped(config: Mapping[str, Any]) -> InputError:
    """What is wrong where no heads of the kind that a row names are shipped for its model."""
    model, kind = config["model"], config["heads"]
    file = f"{Path(model).name}.{kind}.heads.safetensors"
    return InputError(str(Need(f"{kind} heads", file, _heads_command(model, kind, file))))


def _heads_command(model: str, kind: str, out: str) -> str:
    out = shlex.quote(out)
    if kind == "linear":
        return f"tokenswift train --kind linear --model {model} --data pg19 --out {out}"
    more = " --kind medusa --num-heads 4" if kind == "medusa" else " --kind conditioned"
    return f"tokenswift train{more} {_text(model)} --out {out}"


def _text(model: str) -> str:
    return f"--model {shlex.quote(model)} --data pg19 --continued"
