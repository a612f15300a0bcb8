"""``tokenswift models``: the models that have a name, and what of them is here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from tokenswift.cli import options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.results import STDOUT, check_record, write_json
from tokenswift.cli.terminal import say, table
from tokenswift.loader.default_model import cache_dir, shipped_files, trained_files
from tokenswift.loader.named_models import NAMED_MODELS, NamedModel

MEGA = 1e6
GIGA = 1e9
#: ends of files that draft for a model
DRAFTER_ENDS = (".gguf", ".safetensors")


@dataclass(frozen=True)
class Listed(options.Record):
    """How models are listed."""


class ModelRecord(TypedDict):
    """A model, as ``--json`` writes it.

    Attributes:
        name: what -m takes.
        about: in a few words.
        licence: its name.
        terms: what a user of the model agrees to; None where the licence asks for no consent.
        size: of its file in bytes.
        memory: that a process with the model and a short text takes, in bytes.
        path: its file in the cache; None where it is not there yet.
        drafter: a file that was trained to draft for it; None where there is none.
    """

    name: str
    about: str
    licence: str
    terms: str | None
    size: int
    memory: int
    path: str | None
    drafter: str | None


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "models", run, "list the models that have a name")
    add_options(parser, Listed)


def run(args: argparse.Namespace) -> int:
    """List the models that -m takes by name, with their download and memory: which are in the
    cache, and for which a drafter was trained. Any other model is a folder, a GGUF file or a hub
    id."""
    record_path = check_record(args.json)
    records = [record_of(model) for model in NAMED_MODELS.values()]
    if record_path is not None:
        write_json(record_path, *records)
    if record_path != STDOUT:
        say(f"{text_of(records)}\n")
    return 0


def record_of(model: NamedModel) -> ModelRecord:
    """What is known of a model here."""
    cache = cache_dir()
    drafter = drafter_of(model)
    return {
        "name": model.name,
        "about": model.about,
        "licence": model.licence,
        "terms": model.terms or None,
        "size": model.size,
        "memory": model.memory,
        "path": str(model.path(cache)) if model.is_whole(cache) else None,
        "drafter": None if drafter is None else str(drafter),
    }


def drafter_of(model: NamedModel) -> Path | None:
    """A file that was trained to draft for a model, by its name: the user's own first."""
    for end in DRAFTER_ENDS:
        for file in (*trained_files(end), *shipped_files(end)):
            if file.name.startswith((f"{model.name}.", f"{model.stem}.")):
                return file
    return None


def text_of(records: list[ModelRecord]) -> str:
    """Records as a table."""
    rows = [
        (
            record["name"],
            f"{record['size'] / MEGA:,.0f} MB",
            f"{record['memory'] / GIGA:.1f} GB",
            "yes" if record["path"] else "no",
            "yes" if record["drafter"] else "no",
            record["licence"],
        )
        for record in records
    ]
    head = ("name", "download", "memory", "here", "drafter", "licence")
    uses = "\n".join(f"{record['name']}: {record['about']}" for record in records)
    return f"{table(head, rows, right=(1, 2))}\n\n{uses}"
