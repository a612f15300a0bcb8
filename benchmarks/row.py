"""One row: a configuration measured, in a process of its own (see `runner`), and where it was measured: kind
of machine, versions, commit; no names of machines or folders."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import drafts, engine, samplers, schemas, speeds, texts
from benchmarks.common import Trial, options_of
from benchmarks.decode import Progress, decode
from benchmarks.needs import check_needs, heads_place, none_shipped
from benchmarks.roofline import weights_of
from benchmarks.settings import LATER
from tokenswift.config import HEAD_KINDS, OPTIONS, build_options
from tokenswift.engine.llm import LLM
from tokenswift.loader.default_model import RECORD
from tokenswift.loader.find import gguf_in
from tokenswift.loader.identity import file_digest, versions, weights_digest
from tokenswift.loader.load import locate
from tokenswift.loader.rope import parse_rope_scaling
from tokenswift.spec.eagle.files import place_of
from tokenswift.spec.methods import drafts_from
from tokenswift.types import InputError

CHECKOUT = Path(__file__).parents[1]
#: kinds that load no model, or load it themselves
APART: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "memory": engine.memory,
}
#: kinds that draft nothing
UNDRAFTED = ("machine", "draft", "passes", "floats", "quality", "samplers")
#: the other kinds, but for those that decode beside plain decoding
OTHERS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "machine": engine.machine,
    "draft": engine.draft,
    "passes": engine.passes,
    "bookkeeping": engine.bookkeeping,
    "weights": speeds.weights,
    "texts": texts.measure,
    "json": schemas.measure,
    "calibration": drafts.calibration,
    "quality": drafts.quality,
    "samplers": samplers.measure,
    "floats": speeds.floats,
}


def measure(kind: str, config: dict[str, Any], on_progress: Progress = lambda share: None) -> dict[str, Any]:
    """Measure a configuration (see `settings.resolve`).

    Returns:
        What the row says beside its configuration.
    Raises:
        InputError: it cannot be measured with this model or machine.
    """
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    if kind in APART:
        made = {"dtype": config["dtype"], "device": "cpu", "heads": None, **APART[kind](config)}
        return made | provenance("cpu")
    scaling = config["rope_scaling"]
    parse_rope_scaling(scaling)
    check_needs(config)
    with _loaded(config, None if scaling == "none" else scaling) as llm:
        made = {"dtype": llm.dtype, "device": llm.device, "heads": None}
        made |= {"weights": llm.source.identity()["weights"], "stored": stored_as(llm, config)}
        if kind not in UNDRAFTED:
            made |= used(llm, config)
        trial = Trial(llm, config)
        made |= OTHERS[kind](trial) if kind in OTHERS else decode(trial, on_progress, kind == "text")
    return made | provenance(made["device"])


def _loaded(config: dict[str, Any], scaling: str | None) -> LLM:
    heads = heads_place(config)
    place = {name: config[name] for name in ("dtype", "device", *LATER) if name in config}
    try:
        return LLM(config["model"], heads=heads, eagle=config.get("eagle"), rope_scaling=scaling, **place)
    except InputError as error:
        if heads not in HEAD_KINDS or error.field != "heads":
            raise
        raise none_shipped(config) from error


def stored_as(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """What the model's weights are stored as, and the name of its GGUF file, if it has one."""
    file = gguf_in(locate(config["model"]))
    types = sorted(weights_of(llm.target))
    return {"file": None if file is None else file.name, "types": types}


def used(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """The heads, the EAGLE-3 drafter and the draft model that this configuration's strategy uses, with their
    files and training, and what it drafts from."""
    options = build_options(OPTIONS[config["strategy"]], config["strategy"], options_of(config))
    heads, source = drafts_from(llm.resources, config["strategy"], options)
    of_heads = None
    if heads is not None:
        weights = weights_digest(sorted(heads.named_parameters()))
        of_heads = {"kind": heads.kind, "count": heads.count, "weights": weights}
        of_heads |= {"file": Path(heads.source).name, **_training(heads.notes)}
    made = {"heads": of_heads, "drafts": source}
    if "eagle" in config:
        made["eagle"] = _drafter(str(place := place_of(config["eagle"])), place)
        made["drafts"] = source.replace(config["eagle"], made["eagle"]["name"])  # no folder of this machine
    small = config["options"].get("draft_model")
    if small is not None or config["strategy"] == "triforce":
        name = llm.resources.draft_models.name(small)
        made["draft_model"] = _drafter(name, locate(name))
    return made


def _training(notes: dict[str, Any]) -> dict[str, Any]:
    """Of what is noted of a training: tokens and steps."""
    return {name: int(notes[name]) for name in ("tokens", "steps") if name in notes}


def _drafter(name: str, place: Path) -> dict[str, Any]:
    """Where a draft model or an EAGLE-3 drafter comes from; ``place``: its folder or file."""
    record, weights = place / RECORD, place if place.is_file() else place / "model.safetensors"
    notes = json.loads(record.read_text(encoding="utf-8")).get("notes", {}) if record.is_file() else {}
    digest = file_digest(weights)[:32] if weights.is_file() else None
    return {"name": Path(name).name, "weights": digest, **_training(notes)}


def machine(device: str = "auto") -> str:
    """The kind of machine: processor and threads, or the accelerator.

    Args:
        device: where the model runs; "auto" is an accelerator where there is one.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(0)
    model = platform.processor() or platform.machine()
    kind = torch.backends.cpu.get_cpu_capability()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = dict(re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
        model = found.get("model name", model)
        native = {"avx512_bf16", "amx_bf16"} & set(found.get("flags", "").split())
        kind += "" if native else " without bfloat16 products"
    threads = torch.get_num_threads()
    return f"{model} ({kind}), {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str | None:
    """Short hash of the checkout that the library runs from, with a + when it has changes, or None."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "src/tokenswift", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(device: str) -> dict[str, Any]:
    """What every row says of where it comes from."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
