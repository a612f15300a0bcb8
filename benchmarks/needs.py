"""What rows need beside their model: heads, EAGLE-3 drafters, draft models; the command that gets
them.

Light: no torch in here. Heads that a configuration names by kind are the shipped ones of the
default model, and of any other model a file of that kind in the working folder,
``NAME.KIND.heads.safetensors``.
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.settings import Config, Settings
from tokenswift.config.loading import HEAD_KINDS
from tokenswift.loader.default_model import DEFAULT, DRAFT
from tokenswift.loader.find import SHIPPED
from tokenswift.loader.named_models import NAMED_MODELS

#: strategy → the kind of heads that it drafts with
HEADS_OF = {"auto": "conditioned", "tokenswift": "conditioned", "medusa": "medusa"}
#: kind of heads → options of `tokenswift train` beside the kind, where there are any
TRAINING_OPTIONS = {"medusa": " --num-heads 4"}


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


#: ways to run TokenSwift by name (see the file)
METHODS = _read("methods.toml")
#: the paper's models by hub id, and real ones that have a name here
MODELS = _read("models.toml")
#: real models as quantized files, by the name of the file, in which rows call them
FETCHED = {model.stem: model for model in NAMED_MODELS.values() if model.name != DEFAULT}


def with_model(settings: Settings, model: str, strategy: str, named: bool) -> dict[str, Any]:
    """A row's settings, completed for its model: which draft model, and, where ``named``, which
    heads and sampler.

    Args:
        settings: of the spec, the variant and the command; what they say stays.
        named: heads are named by kind, so that no row runs without any unsaid.
    """
    about = MODELS.get(model, {})
    completed = dict(settings)
    if named:
        if "sampler" in about:
            completed.setdefault("sampler", about["sampler"])
        if completed.get("heads", "auto") == "auto" and strategy in HEADS_OF:
            completed["heads"] = HEADS_OF[strategy]
    if completed.get("eagle") == "own":
        completed["eagle"] = SHIPPED if model == DEFAULT else eagle_file(model)
    if completed.get("draft_model") == "standalone":
        completed["draft_model"] = about.get("standalone", DRAFT)
    elif strategy == "triforce" and about:
        completed.setdefault("draft_model", about.get("draft", f"{Path(model).name}.draft"))
    return completed


def heads_file(model: str, kind: str) -> str:
    """The working folder's file of a model's heads of a kind."""
    return f"{Path(model).name}.{kind}.heads.safetensors"


def eagle_file(model: str) -> str:
    """The working folder's file of a model's EAGLE-3 drafter."""
    return f"{Path(model).name}.eagle.gguf"


def heads_place(config: Config) -> str:
    """What a row's model is to be loaded with as ``heads``."""
    heads = config["heads"]
    model = config["model"]
    file = heads_file(model, heads)
    is_there = Path(file).is_file()
    published = MODELS.get(model, {}).get("linear")
    if heads == "linear" and not is_there and published:
        return published
    if heads not in HEAD_KINDS or model == DEFAULT:
        return heads
    return file if is_there or model in MODELS or model in NAMED_MODELS else heads


def missing(config: Config) -> str:
    """The files of the working folder that a row lacks, each with the command that makes it; "" for
    none."""
    model = config["model"]
    kinds = {config.get("eagle"): "eagle"}
    if config["strategy"] in HEADS_OF:
        kinds[heads_place(config)] = config["heads"]
    trainable = {eagle_file(model), *(heads_file(model, kind) for kind in HEAD_KINDS)}
    return "; ".join(
        f"{file} is missing, run: {training_command(model, kind, file)}"
        for file, kind in kinds.items()
        if file in trainable and not Path(file).exists()
    )


def training_command(model: str, kind: str, file: str) -> str:
    """What makes a file of heads or a drafter."""
    return (
        f"tokenswift train --kind {kind} --model {shlex.quote(model)} --data BOOKS"
        f"{TRAINING_OPTIONS.get(kind, '')} --out {shlex.quote(file)}"
    )
