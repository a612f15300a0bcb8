"""One row: a configuration measured, in a process of its own (see `runner`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from tokenswift.benchmark import machine, roofline
from tokenswift.benchmark.prompts import prompt
from tokenswift.benchmark.race import COLUMNS, Side, figures, race
from tokenswift.config import SamplingParams
from tokenswift.llm import LLM
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.report.figures import repeats

Progress = Callable[[float], None]


def measure(kind: str, config: dict[str, Any], on_progress: Progress = lambda share: None) -> dict[str, Any]:
    """Measure a configuration (see `settings.resolve`).

    Returns:
        What the row says beside its configuration.
    Raises:
        InputError: it cannot be measured with this model or machine.
    """
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    scaling = config["rope_scaling"]
    parse_rope_scaling(scaling)
    with LLM(
        config["model"],
        dtype=config["dtype"],
        device=config["device"],
        heads=config["heads"],
        rope_scaling=None if scaling == "none" else scaling,
    ) as llm:
        heads = {"kind": llm.heads.kind, "count": llm.heads.count} if llm.heads is not None else None
        made: dict[str, Any] = {"dtype": llm.dtype, "device": llm.device, "heads": heads}
        if kind == "machine":
            made |= roofline.measure(llm, config)
        elif kind == "draft":
            made |= {"draft": roofline.draft(llm, config["options"].get("draft_model"))}
        else:
            made |= _decode(llm, config, kind == "text", on_progress)
    return made | machine.provenance(made["device"])


def _decode(llm: LLM, config: dict[str, Any], keep: bool, on_progress: Progress) -> dict[str, Any]:
    points: list[int] = config["points"]
    length: int = config["prefill"]
    measured = list(points)
    if config["reach"] == "text":  # the last tokens of the length are generated, all before are prompt
        new = min(config["measured"], points[-1])
        length, measured = length + points[-1] - new, [new]
    begun = prompt(config["prompts"], llm.encode, config["text"], length)
    base = llm.prefill(begun.ids)
    params = SamplingParams(**config["sampling"])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    plain, way = race(base, config["strategy"], options, params, measured, on_progress)
    exact = options.get("acceptance", "exact") == "exact"
    return {
        "prompt": {"name": begun.name, "tokens": len(begun.ids), "digest": begun.digest},
        "context": f"{len(begun.ids)} tokens prefilled, {measured[-1]} generated",
        "reached": "by prefilled text" if config["reach"] == "text" else "by generating",
        "prefill_seconds": round(base.seconds, 4),
        "lossless": exact,
        "identical": plain.tokens == way.tokens,
        "digest": hashlib.sha256(" ".join(map(str, way.tokens)).encode()).hexdigest()[:16],
        "figures": {str(point): figures(plain, way, at) for point, at in zip(points, measured, strict=True)},
        "raw": {"columns": COLUMNS, "plain": _raw(plain), "way": _raw(way)},
        **({"stretches": _stretches(llm, way.tokens)} if keep else {}),
    }


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
