"""One row: a configuration measured, in a process of its own (see `runner`), and where it was
measured: kind of machine, versions, commit; no names of machines or folders."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from benchmarks import engine, floats, schemas
from benchmarks.common import Trial, options_of
from benchmarks.decode import decode
from benchmarks.needs import heads_place, missing
from benchmarks.settings import DEFAULTS, Config
from benchmarks.words import Measured
from tokenswift.config.strategies import build_options
from tokenswift.engine.llm import LLM
from tokenswift.loader.find import gguf_in, locate
from tokenswift.loader.identity import file_digest, versions, weights_digest
from tokenswift.speculation.eagle.find import place_of
from tokenswift.speculation.eagle.model import EagleModel
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.methods import drafts_from
from tokenswift.types import InputError

CHECKOUT = Path(__file__).parents[1]
#: how rows of a kind are measured
KINDS: dict[str, Callable[[Trial], Measured]] = {
    "decode": decode,
    "text": partial(decode, keep_text=True),
    "machine": engine.machine,
    "passes": engine.passes,
    "texts": engine.texts,
    "floats": floats.speed,
    "json": schemas.measure,
}
#: lines of Linux's description of a processor
CPUINFO = re.compile(r"^(model name|cpu family|model|flags)\s*: (.*)$", re.MULTILINE)
#: kinds of measurements without drafts
UNDRAFTED = ("machine", "passes", "floats")


def measure(kind: str, config: Config) -> Measured:
    """Measure a configuration.

    Returns:
        What the row says beside its configuration.
    Raises:
        InputError: it cannot be measured with this model or machine.
    """
    logging.getLogger("tokenswift").setLevel(logging.ERROR)  # the row says what a run is told
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    if lacking := missing(config):
        raise InputError(lacking)
    with load(config) as llm:
        row: Measured = {
            "dtype": llm.dtype,
            "device": llm.device,
            "heads": None,
            "weights": llm.source.identity["weights"],
            "stored": stored_as(llm, config),
        }
        if kind not in UNDRAFTED:
            row |= drafters_of(llm, config)
        row |= KINDS[kind](Trial(llm, config))
        return row | provenance(llm.device)


def load(config: Config) -> LLM:
    """The model of a row, with its heads and drafter."""
    scaling = config["rope_scaling"]
    return LLM(
        config["model"],
        dtype=config["dtype"],
        device=config["device"],
        heads=heads_place(config),
        eagle=config.get("eagle"),
        rope_scaling=None if scaling == "none" else scaling,
        weights=config.get("weights", DEFAULTS["weights"]),
        kv_cache_dtype=config.get("kv_cache_dtype", DEFAULTS["kv_cache_dtype"]),
        backend=config.get("backend", DEFAULTS["backend"]),
    )


def stored_as(llm: LLM, config: Config) -> Measured:
    """What the model's weights are stored as, and the name of its GGUF file, if it has one."""
    file = gguf_in(locate(config["model"]))
    types = sorted(engine.weights_of(llm.target))
    return {"file": None if file is None else file.name, "types": types}


def drafters_of(llm: LLM, config: Config) -> Measured:
    """The heads, the EAGLE-3 drafter and the draft model that this configuration's strategy uses,
    and what it drafts from."""
    options = build_options(config["strategy"], options_of(config))
    heads, drafts = drafts_from(llm.resources, config["strategy"], options)
    row: Measured = {"heads": None if heads is None else about_heads(heads), "drafts": drafts}
    eagle = llm.resources.eagle
    if config.get("eagle") == "auto" and isinstance(eagle, EagleModel):
        place = Path(eagle.name)
        row["eagle"] = about_weights(place)
        row["drafts"] = drafts.replace(eagle.name, place.name)  # no folder of this machine
    elif "eagle" in config and config["eagle"] != "auto":
        place = place_of(config["eagle"])
        row["eagle"] = about_weights(place)
        row["drafts"] = drafts.replace(config["eagle"], place.name)  # no folder of this machine
    draft_model = config["options"].get("draft_model")
    if draft_model is not None or config["strategy"] == "triforce":
        row["draft_model"] = about_weights(locate(llm.resources.draft_models.name(draft_model)))
    return row


def about_heads(heads: Heads) -> Measured:
    """What a row says of draft heads: kind, file, weights, and how they were trained."""
    notes = {name: heads.notes[name] for name in ("tokens", "steps") if name in heads.notes}
    return {
        "kind": heads.kind,
        "count": heads.count,
        "file": Path(heads.source).name,
        "weights": weights_digest(sorted(heads.named_parameters())),
        **notes,
    }


def about_weights(place: Path) -> Measured:
    """What a row says of a draft model or an EAGLE-3 drafter: a file, or a folder with one."""
    weights = place if place.is_file() else place / "model.safetensors"
    return {"name": place.name, "weights": file_digest(weights)[:32] if weights.is_file() else None}


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
        about = dict(CPUINFO.findall(cpuinfo.read_text()))
        model = about.get("model name", model)
        if "cpu family" in about:  # tells apart processors that have the same name
            model += f" family {about['cpu family']} model {about['model']}"
        native = {"avx512_bf16", "amx_bf16"} & set(about.get("flags", "").split())
        kind += "" if native else " without bfloat16 products"
    threads = torch.get_num_threads()
    return f"{model} ({kind}), {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str | None:
    """Short hash of the checkout that the library runs from, with a + when it has changes, or
    None."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        code = ("src/tokenswift", "benchmarks", ":!benchmarks/results")
        changed = git("status", "--porcelain", "-uno", *code)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(device: str) -> Measured:
    """What every row says of where it comes from."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
