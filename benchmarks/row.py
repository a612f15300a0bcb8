"""One row: a configuration measured, in a process of its own (see `runner`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    drafts,
    engine,
    llama,
    load,
    machine,
    ngram,
    peer,
    quality,
    rates,
    roofline,
    stored,
    texts,
)
from benchmarks.needs import check_needs, heads_place, none_shipped
from benchmarks.paired import COLUMNS, Side, figures, paired_run
from benchmarks.prompts import Prompt, prompt
from benchmarks.settings import LATER
from tokenswift.config import HEAD_KINDS, OPTIONS, SamplingParams, build_options
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Stream
from tokenswift.loader.gguf.find import gguf_in
from tokenswift.loader.identity import file_digest, weights_digest
from tokenswift.loader.load import locate
from tokenswift.loader.made import RECORD
from tokenswift.loader.rope import parse_rope_scaling
from tokenswift.roofline.sizes import sizes_of_target
from tokenswift.runs.report.figures import repeats
from tokenswift.spec.methods.table import drafts_from
from tokenswift.types import InputError

Progress = Callable[[float], None]


#: kinds that load no model, or load it themselves
APART: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "memory": engine.memory,
    "ngram": ngram.measure,
    "llama": llama.measure,
}
#: kinds that draft nothing
UNDRAFTED = ("machine", "draft", "passes", "prefill", "load", "floats", "quality")
#: kinds that measure a model otherwise than by decoding beside plain decoding
OTHERS: dict[str, Callable[[LLM, dict[str, Any]], dict[str, Any]]] = {
    "machine": roofline.measure,
    "draft": roofline.draft,
    "passes": engine.passes,
    "prefill": engine.prefill,
    "bookkeeping": engine.bookkeeping,
    "load": load.measure,
    "weights": stored.measure,
    "texts": texts.measure,
    "nodes": drafts.nodes,
    "calibration": drafts.calibration,
    "quality": quality.measure,
    "rates": rates.measure,
    "floats": rates.against_transformers,
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
        return made | machine.provenance("cpu")
    scaling = config["rope_scaling"]
    parse_rope_scaling(scaling)
    check_needs(config)
    with _loaded(config, None if scaling == "none" else scaling) as llm:
        made = {"dtype": llm.dtype, "device": llm.device, "heads": None}
        made["weights"] = llm.source.identity()["weights"]
        made["stored"] = stored_as(llm, config)
        if kind not in UNDRAFTED:
            made |= used(llm, config)
        if kind in OTHERS:
            made |= OTHERS[kind](llm, config)
        elif kind == "peer":
            begun = _prompt(llm, config, config["prefill"])
            made |= _named(begun) | peer.measure(llm, config, begun.ids)
        else:
            made |= _decode(llm, config, kind == "text", on_progress)
    return made | machine.provenance(made["device"])


def _loaded(config: dict[str, Any], scaling: str | None) -> LLM:
    heads = heads_place(config)
    place = {name: config[name] for name in ("dtype", "device", *LATER) if name in config}
    try:
        return LLM(config["model"], heads=heads, rope_scaling=scaling, **place)
    except InputError as error:
        if heads not in HEAD_KINDS or error.field != "heads":
            raise
        raise none_shipped(config) from error


def stored_as(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """What the model's weights are stored as, and the name of its GGUF file, if it has one."""
    file = gguf_in(Path(locate(config["model"])[0]))
    return {
        "file": None if file is None else file.name,
        "types": sorted(sizes_of_target(llm.target).weights),
    }


def used(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """The heads and the draft model that this configuration's strategy uses, with their files and training,
    and what it drafts from."""
    options = build_options(OPTIONS[config["strategy"]], config["strategy"], _options(config))
    heads, source = drafts_from(llm, config["strategy"], options)
    of_heads = None
    if heads is not None:
        weights = weights_digest(sorted(heads.named_parameters()))
        of_heads = {"kind": heads.kind, "count": heads.count, "weights": weights}
        of_heads |= {"file": Path(heads.source).name, **_training(heads.notes)}
    made = {"heads": of_heads, "drafts": source}
    small = config["options"].get("draft_model")
    if small is not None or config["strategy"] == "triforce":
        made["draft_model"] = _draft_model(llm.draft_name(small))
    return made


def _training(notes: dict[str, Any]) -> dict[str, Any]:
    """Of what is noted of a training: tokens and steps."""
    return {name: int(notes[name]) for name in ("tokens", "steps") if name in notes}


def _draft_model(name: str) -> dict[str, Any]:
    """Where a draft model comes from."""
    folder = Path(locate(name)[0])
    record, weights = folder / RECORD, folder / "model.safetensors"
    notes = json.loads(record.read_text(encoding="utf-8")).get("notes", {}) if record.is_file() else {}
    digest = file_digest(weights)[:32] if weights.is_file() else None
    return {"name": Path(name).name, "weights": digest, **_training(notes)}


def _options(config: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}


def _prompt(llm: LLM, config: dict[str, Any], length: int) -> Prompt:
    return prompt(config["prompts"], llm.encode, config["text"], length, llm.target.vocab_size)


def _named(begun: Prompt) -> dict[str, Any]:
    return {"prompt": {"name": begun.name, "tokens": len(begun.ids), "digest": begun.digest}}


def _decode(llm: LLM, config: dict[str, Any], keep: bool, on_progress: Progress) -> dict[str, Any]:
    points: list[int] = config["points"]
    length: int = config["prefill"]
    measured = list(points)
    if config["reach"] == "text":  # the last tokens of the length are generated, all before are prompt
        new = min(config["measured"], points[-1])
        length, measured = length + points[-1] - new, [new]
    begun = _prompt(llm, config, length)
    base = llm.prefill(begun.ids)
    params, options = SamplingParams(**config["sampling"]), _options(config)
    plain, variant = paired_run(base, config["strategy"], options, params, measured, on_progress)
    exact = options.get("acceptance", "exact") == "exact"
    found = {str(point): figures(plain, variant, at) for point, at in zip(points, measured, strict=True)}
    drafting = _whole(variant, found[str(points[-1])])
    return {
        **_named(begun),
        "context": f"{len(begun.ids)} tokens prefilled, {measured[-1]} generated",
        "reached": "by prefilled text" if config["reach"] == "text" else "by generating",
        "prefill_seconds": round(base.seconds, 4),
        "lossless": exact,
        "identical": plain.tokens == variant.tokens,
        "digest": hashlib.sha256(" ".join(map(str, variant.tokens)).encode()).hexdigest()[:16],
        "figures": found,
        "raw": {"columns": COLUMNS, "plain": _raw(plain), "variant": _raw(variant)},
        **({"drafting": drafting} if drafting else {}),
        **({"stretches": _stretches(llm, variant.tokens)} if keep else {}),
    }


def _whole(variant: Side, last: dict[str, Any]) -> dict[str, Any] | None:
    """Add to the last point's figures those of the whole run alone; what automatic drafting says of it."""
    if not isinstance(variant.steps, Stream):
        return None
    done, total = variant.steps.result, sum(variant.phases.values())
    last |= {f"share_{name}": round(seconds / total, 4) for name, seconds in variant.phases.items()}
    last["draft_passes"] = round(done.metrics.draft_passes / done.metrics.steps, 3)
    if done.drafting and "controller_share" in done.drafting:
        last["share_deciding"] = done.drafting["controller_share"]
    return done.drafting


def _raw(side: Side) -> dict[str, Any]:
    phases = {name: round(seconds, 6) for name, seconds in side.phases.items()}
    return {"curve": side.curve, "phases": phases}


def _stretches(llm: LLM, tokens: list[int]) -> list[list[Any]]:
    """The text in stretches, [text, whether it repeats an earlier one]."""
    marked = repeats(tokens)
    edges = [0, *(i for i in range(1, len(tokens)) if marked[i] != marked[i - 1]), len(tokens)]
    return [
        [llm.tokenizer.decode(tokens[start:end]), marked[start]]
        for start, end in zip(edges, edges[1:], strict=False)
    ]
