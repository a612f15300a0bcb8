"""The draft model of the default model: a few layers of its own, embeddings and LM head of that model.

Only the trained layers and the final norm are in the repository (`loader.shipped`): one safetensors file,
with the config in its header. :func:`ensure` builds an ordinary transformers folder from them and the default
model, so that strategies with a draft model load it like any other checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from tokenswift.loader import embedded
from tokenswift.loader.identity import TOLERANCE, distance, file_digest, sample_of
from tokenswift.loader.made import RECORD, made_whole, write_record
from tokenswift.loader.shipped import WHERE, weights
from tokenswift.types import InputError, OnProgress, RunError

NAME = f"{embedded.NAME}-draft"
PACKED = f"{embedded.NAME}.draft.safetensors"
METADATA_KEY = "tokenswift_draft"
VERSION = 1  # of the packed file
FORMAT = 1  # raised whenever the folder's making changes, so that older folders are made anew
SHARED = ("embed_tokens.weight", "lm_head.weight")  # ends of the names of what the target gives
SAMPLE = "target.sample"
ENDS = (".json", ".safetensors", ".jinja", ".txt", ".model")  # of the files of a model folder
NEED = "the draft model needs 150 MB"

logger = logging.getLogger("tokenswift")


def ensure(cache: Path, on_progress: OnProgress | None = None) -> Path:
    """The folder of the packaged draft model below ``cache``; builds it on first use.

    Arguments as of the default model's own.

    Raises:
        InputError: the cache folder cannot be written, or what the default model's own raises.
        RunError: the packaged file does not fit the default model, or the disk is full.
    """
    entry = next(iter(weights(PACKED)), None)
    if entry is None:
        raise InputError(f"model {NAME} is not part of this installation ({WHERE})")
    target = embedded.ensure(cache, on_progress)
    folder = cache / NAME
    with resources.as_file(entry) as packed:
        digest = file_digest(packed)

        def make(partial: Path) -> None:
            logger.info("building the draft model %s (114 MB, once) in %s", NAME, folder)
            build(packed, target, partial / "model", {"sha256": digest, "format": FORMAT})

        made_whole(folder, digest, FORMAT, NEED, make)
    return folder


def check_out(out: Path) -> None:
    """Raise :class:`InputError` unless ``out`` is free, or a draft model of ``train-draft`` and no more."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        ours = isinstance(record, dict) and {"target", "notes"} <= set(record) and "sha256" not in record
        ours = ours and all(path.is_file() and path.suffix in ENDS for path in out.iterdir())
    except (OSError, ValueError, RecursionError):
        ours = False
    if not ours:
        raise InputError(
            f"out {out} exists and is not a draft model of train-draft; valid: a new or empty folder, or one "
            "that holds such a model and nothing else"
        )


def build(packed: Path, target: Path, folder: Path, record: dict[str, Any]) -> None:
    """Write a transformers folder of the draft model.

    Args:
        packed: a file from :func:`tokenswift.train.draft.packed`.
        target: the target model's folder (one ``model.safetensors``, or a GGUF file, whose embeddings are
            unpacked to float32); gives embeddings and tokenizer, and the type of the weights.
        folder: the folder to make.
        record: what its ``tokenswift.json`` holds besides the name and the notes.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        with safe_open(packed, framework="pt") as file:
            header = json.loads((file.metadata() or {})[METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["version"] != VERSION:
            raise RunError(f"{packed.name} has version {header['version']}; known: {VERSION}")
        shared = shared_of(target)
        embedding = next(tensor for name, tensor in shared.items() if name.endswith(SHARED[0]))
        wanted = tensors.pop(SAMPLE)
    except (SafetensorError, KeyError, ValueError, StopIteration) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(
            f"the draft model {packed.name} cannot be built ({reason}); nothing was kept"
        ) from error
    sizes = (header["config"]["vocab_size"], header["config"]["hidden_size"])
    far = distance(wanted, sample_of(embedding))
    if tuple(embedding.shape) != sizes or not far <= TOLERANCE:
        raise RunError(f"the draft model {packed.name} was made for another model than {target}")
    folder.mkdir()
    tensors = {name: tensor.to(embedding.dtype) for name, tensor in tensors.items()} | shared
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"the draft model cannot be written to {folder.parent.parent} ({error})") from error
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    kind = str(embedding.dtype).removeprefix("torch.")
    config = {**header["config"], "dtype": kind}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in target.iterdir():  # tokenizer, chat template, generation defaults
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in ("config.json", RECORD):
            shutil.copyfile(path, folder / path.name)
    known = {"name": NAME, "target": header["target"], "notes": header["notes"], **record}
    write_record(folder, known)


def shared_of(target: Path) -> dict[str, Any]:
    """Embeddings and, where it has its own, LM head of a target model's folder, by name."""
    from safetensors import safe_open

    from tokenswift.loader.find import gguf_in

    if (gguf := gguf_in(target)) is None:
        with safe_open(target / "model.safetensors", framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(SHARED)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    import torch

    from tokenswift.loader.config import EMBEDDING, HEAD
    from tokenswift.loader.gguf import OUTER, GgufFile
    from tokenswift.loader.weights import unstored

    there = GgufFile(gguf)
    names = [name for name in (EMBEDDING, HEAD) if OUTER[name] in there.tensors]
    return {name: unstored(there[OUTER[name]], torch.float32).clone() for name in names}
