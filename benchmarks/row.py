"""One row: a configuration measured, in a process of its own (see `runner`), and where it was
measured: kind of machine, versions, commit; no names of machines or folders."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine, floats, schemas
from benchmarks.common import Trial, options_of
from benchmarks.decode import decode
from benchmarks.needs import heads_place, missing
from benchmarks.settings import LATER
from tokenswift.config.strategies import build_options
from tokenswift.engine.llm import LLM
from tokenswift.loader.find import gguf_in, locate
from tokenswift.loader.identity import file_digest, versions, weights_digest
from tokenswift.speculation.eagle.find import place_of
from tokenswift.speculation.methods import drafts_from
from tokenswift.types import InputError

CHECKOUT = Path(__file__).parents[1]
#: how rows of a kind are measured
KINDS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "decode": decode,
    "text": lambda trial: decode(trial, keep=True),
    "machine": engine.machine,
    "passes": engine.passes,
    "texts": engine.texts,
    "floats": floats.speed,
    "json": schemas.measure,
}
UNDRAFTED = ("machine", "passes", "floats")


def measure(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Measure a configuration (see `settings.resolve`).

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
    scaling = None if config["rope_scaling"] == "none" else config["rope_scaling"]
    place = {name: config[name] for name in ("dtype", "device", *LATER) if name in config}
    drafters = {"heads": heads_place(config), "eagle": config.get("eagle")}
    with LLM(config["model"], **drafters, rope_scaling=scaling, **place) as llm:
        made = {"dtype": llm.dtype, "device": llm.device, "heads": None}
        made |= {"weights": llm.source.identity["weights"], "stored": stored_as(llm, config)}
        if kind not in UNDRAFTED:
            made |= used(llm, config)
        made |= KINDS[kind](Trial(llm, config))
    return made | provenance(made["device"])


def stored_as(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """What the model's weights are stored as, and the name of its GGUF file, if it has one."""
    file = gguf_in(locate(config["model"]))
    types = sorted(engine.weights_of(llm.target))
    return {"file": None if file is None else file.name, "types": types}


def used(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """The heads, the EAGLE-3 drafter and the draft model that this configuration's strategy uses,
    and what it drafts from."""
    options = build_options(config["strategy"], options_of(config))
    heads, source = drafts_from(llm.resources, config["strategy"], options)
    made: dict[str, Any] = {"heads": None, "drafts": source}
    if heads is not None:
        made["heads"] = {"kind": heads.kind, "count": heads.count, "file": Path(heads.source).name}
        made["heads"]["weights"] = weights_digest(sorted(heads.named_parameters()))
        made["heads"] |= {
            name: heads.notes[name] for name in ("tokens", "steps") if name in heads.notes
        }
    if "eagle" in config:
        made["eagle"] = _drafter(place_of(config["eagle"]))
        made["drafts"] = source.replace(
            config["eagle"], made["eagle"]["name"]
        )  # no folder of this machine
    small = config["options"].get("draft_model")
    if small is not None or config["strategy"] == "triforce":
        made["draft_model"] = _drafter(locate(llm.resources.draft_models.name(small)))
    return made


def _drafter(place: Path) -> dict[str, Any]:
    """A draft model or an EAGLE-3 drafter: a file, or a folder with one."""
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
        found = dict(
            re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        )
        model = found.get("model name", model)
        native = {"avx512_bf16", "amx_bf16"} & set(found.get("flags", "").split())
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
