"""``tokenswift plan``: what memory and time a run will take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, TypedDict

from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.call import call_from, request_for_model
from tokenswift.cli.results import check_record, write_results
from tokenswift.cli.terminal import table
from tokenswift.config.fields import SHOWN

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM
    from tokenswift.engine.sequence import Sequence

RUN_TOKENS = 96  # new tokens of a plan's short run
RUN_PROMPT = 1024  # tokens of the end of the prompt, which the short run continues
GIGA = 1e9
#: names of memory (`memory.Need`) → what the table calls it, with its value
PARTS_IN_WORDS = {
    "prompt": "keys and values of the prompt, {}",
    "max_new_tokens": "keys and values of {} new tokens",
    "tree": "drafts of a step",
    "recycle": "table of earlier choices",
    "eagle": "trained drafter",
    "ngrams": "n-grams of earlier text, {}",
    "budget": "keys and values for drafting, {} tokens",
}


@dataclass(frozen=True)
class Plan(options.Record):
    """What is planned.

    Attributes:
        no_measure: no measurement, memory only
    """

    no_measure: Annotated[bool, SHOWN] = False


class Forecast(TypedDict):
    """What a run will take, as ``--json`` writes it.

    Attributes:
        prompt: tokens of the prompt.
        new: new tokens.
        parts: bytes of memory by part.
        peak: their sum.
        weights_read: bytes of weights that a token reads; of a mixture of experts, fewer than there
            are.
        weights: bytes of all weights that passes may read.
        int16_keys: layers whose keys are of 16 bits.
        free: bytes that are available; None where the system does not say.
        most: the most new tokens that fit them and the model's positions; None as for ``free``.
        positions: the most new tokens that the model has positions for; None where it has no limit.
        seconds: expected; None where nothing is measured.
        tokens_per_second: of the short run; None where nothing is measured.
    """

    prompt: int
    new: int
    parts: dict[str, int]
    peak: int
    weights_read: int
    weights: int
    int16_keys: list[int]
    free: int | None
    most: int | None
    positions: int | None
    seconds: float | None
    tokens_per_second: float | None


def plan(args: argparse.Namespace) -> int:
    """Estimate what generate would take with these options: memory by part, compared with what is
    free, and time, from a short run. A run that cannot fit is refused, with the greatest length
    that would fit."""
    prompt, settings = call_from(args)
    record_path = check_record(args.json)
    llm = options.load_model(args)

    from tokenswift.engine.sequence import Sequence

    run = Sequence(llm.resources, request_for_model(args, llm, prompt, settings))
    forecast = memory_forecast(run)
    if not args.no_measure:
        measure_time(llm, run, forecast)
    write_results(record_path, forecast, text_of(forecast))
    return 0


def memory_forecast(run: Sequence) -> Forecast:
    """The memory that a run will take; its times are not measured yet.

    Args:
        run: the run, which has not begun (so it is known to fit what is free).
    """
    from tokenswift.memory import largest, needs_of

    target = run.model
    prompt = len(run.prompt)
    parts = {"weights": target.held_bytes + target.copied_bytes}
    parts["the rest of the program"] = max(0, target.backend.memory_used() - parts["weights"])
    for need in needs_of(target, run.strategy, prompt, run.max_new_tokens):
        if need.sure:
            parts[f"{need.name} {need.value}"] = need.nbytes
    memory = target.backend.memory()
    limit = target.rotary.limit
    positions = None if limit is None else limit - prompt
    most = None
    if memory is not None:
        most = largest(target, run.strategy, prompt, memory.free)
        if positions is not None:
            most = min(most, positions)
    return {
        "prompt": prompt,
        "new": run.max_new_tokens,
        "parts": parts,
        "peak": sum(parts.values()),
        "weights_read": target.weight_bytes,
        "weights": target.held_bytes,
        "int16_keys": target.wide_layers,
        "free": None if memory is None else memory.free,
        "most": most,
        "positions": positions,
        "seconds": None,
        "tokens_per_second": None,
    }


def measure_time(llm: LLM, run: Sequence, forecast: Forecast) -> None:
    """Add to a forecast the time that a short run, of the end of the prompt, makes likely."""
    short = replace(
        run.request,
        max_new_tokens=min(RUN_TOKENS, run.max_new_tokens),
        prompt=run.prompt[-RUN_PROMPT:],
        stop=(),
        ignore_eos=run.request.sampling.grammar is None,
    )
    metrics = llm.start(short).finish().metrics
    prompt = len(run.prompt)
    prefill_seconds = prompt * metrics.prefill_seconds / min(prompt, RUN_PROMPT)
    forecast["tokens_per_second"] = metrics.tokens_per_second
    forecast["seconds"] = prefill_seconds + run.max_new_tokens / metrics.tokens_per_second


def part_in_words(name: str) -> str:
    """A part of a forecast's memory (`memory.Need`) as its table calls it."""
    kind, _, value = name.partition(" ")
    words = PARTS_IN_WORDS.get(kind)
    if words is None:
        return name
    numbers = (f"{int(part):,}" if part.isdecimal() else part for part in value.split(" "))
    return words.format(" ".join(numbers))


def room_in(forecast: Forecast) -> str:
    """Which text the memory of a forecast has room for, in words."""
    most = forecast["most"] or 0
    if most == forecast["positions"]:
        positions = counted(most, "new token", "new tokens")
        return f"enough for all {positions} that the model has positions for"
    return f"up to {counted(most, 'new token fits', 'new tokens fit')}"


def text_of(forecast: Forecast) -> str:
    """A forecast as text."""
    parts = forecast["parts"] | {"expected peak": forecast["peak"]}
    sizes = [(part_in_words(name), f"{size / GIGA:.3f}") for name, size in parts.items()]
    prompt = counted(forecast["prompt"], "token")
    lines = [
        f"{prompt} of prompt, {counted(forecast['new'], 'new token')}",
        "",
        table(("memory", "GB"), sizes, right=(1,)),
        "",
    ]
    if forecast["weights_read"] < forecast["weights"]:
        read = f"{forecast['weights_read'] / GIGA:.3f}"
        lines.append(f"a token reads {read} of {forecast['weights'] / GIGA:.3f} GB of weights")
    if forecast["int16_keys"]:
        lines.append(f"keys have 16 bits in layers {', '.join(map(str, forecast['int16_keys']))}")
    if forecast["free"] is not None and forecast["most"] is not None:
        lines.append(f"{forecast['free'] / GIGA:.1f} GB more is available now: {room_in(forecast)}")
    if forecast["seconds"] is not None:
        time = timedelta(seconds=round(forecast["seconds"]))
        lines.append(
            f"expected time about {time} ({forecast['tokens_per_second']:.1f} tokens/s in a short "
            f"run; far into a long text a token takes longer)"
        )
    return "\n".join(lines)
