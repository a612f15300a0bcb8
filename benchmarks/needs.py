"""What rows need beside their model: heads, EAGLE-3 drafters, draft models; the command that gets
them.

Light: no torch in here. Heads that a configuration names by kind are the shipped ones of the
    default model,
and of any other model a file of that kind in the working folder, ``NAME.KIND.heads.safetensors``.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenswift.config.loading import HEAD_KINDS
from tokenswift.loader.default_model import DEFAULT, DRAFT
from tokenswift.loader.find import SHIPPED

#: strategy → the kind of heads that it drafts with
HEADS_OF = {"auto": "conditioned", "tokenswift": "conditioned", "medusa": "medusa"}
#: what `tokenswift train` makes → further options of it, where there are any
TRAINED = {"medusa": " --num-heads 4"}


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


#: ways to run TokenSwift by name (see the file), and the paper's models by hub id
METHODS, MODELS = _read("methods.toml"), _read("models.toml")
#: real models by name: the packages that hold them, and their SHA-256
FETCHED = MODELS.pop("fetched")


def of_model(model: str, strategy: str, settings: Mapping[str, Any], named: bool) -> dict[str, Any]:
    """A row's settings for its model: which draft model, and, where ``named``, which heads and
    sampler.

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
        made["eagle"] = SHIPPED if model == DEFAULT else f"{Path(model).name}.eagle.gguf"
    if made.get("draft_model") == "standalone":
        made["draft_model"] = known.get("standalone", DRAFT)
    elif strategy == "triforce" and known:
        made.setdefault("draft_model", known.get("draft", f"{Path(model).name}.draft"))
    return made


def heads_place(config: Mapping[str, Any]) -> str:
    """What a row's model is to be loaded with as ``heads``."""
    heads, model = config["heads"], config["model"]
    file = Path(f"{Path(model).name}.{heads}.heads.safetensors")
    if (
        heads == "linear"
        and not file.is_file()
        and (published := MODELS.get(model, {}).get("linear"))
    ):
        return published
    own = heads in HEAD_KINDS and model != DEFAULT and (file.is_file() or model in MODELS)
    return str(file) if own else heads


def missing(config: Mapping[str, Any]) -> str:
    """The files of the working folder that a row lacks, each with the command that makes it; "" for
    none."""
    model = config["model"]
    wanted = {config.get("eagle"): "eagle"}
    if config["strategy"] in HEADS_OF:
        wanted[heads_place(config)] = config["heads"]
    ours = {f"{Path(model).name}.eagle.gguf"}
    ours |= {f"{Path(model).name}.{kind}.heads.safetensors" for kind in HEAD_KINDS}
    return "; ".join(
        f"{file} is missing, run: tokenswift train --kind {kind} --model {shlex.quote(model)} "
        f"--data BOOKS"
        f"{TRAINED.get(kind, '')} --out {shlex.quote(file)}"
        for file, kind in wanted.items()
        if file in ours and not Path(file).exists()
    )
