"""``tokenswift bench``: how fast this model is on this machine, by context: its prompt, plain decoding and
adaptive drafting."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from importlib import resources
from statistics import median
from typing import Any

from tokenswift.checks import check_integer
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.options import read_named, token_ids
from tokenswift.cli.output import check_record, give
from tokenswift.cli.terminal import table
from tokenswift.config import SamplingParams
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
STRATEGIES = {"plain": "autoregressive", "adaptive": "auto"}
LETTERS = 16  # characters of a token at most: what of a text is tokenized


@dataclass(frozen=True)
class Measured:
    """What is measured.

    Attributes:
        contexts: lengths of the prompt in tokens, several with commas
        repeats: how often each is measured, after a warm-up
        max_new_tokens: tokens to write each time, at least 1
        prompt_file: text to continue; default: the stories that come with the library
    """

    contexts: list[int] = option((1024, 4096), "N,N,…", type=token_ids)
    repeats: int = option(5, least=1)
    max_new_tokens: int = option(64, least=1)
    prompt_file: str | None = option(None, "F")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "bench", run, "measure the speed of a model on this machine")
    options.add_model_options(parser)
    add_options(parser.add_argument_group("measurement"), Measured)
    add_options(parser.add_argument_group("results"), options.Record)


def run(args: argparse.Namespace) -> int:
    """Measure a model on this machine: prompt tokens per second, and tokens per second of plain decoding and
    of adaptive drafting, in turns, with the same prompt and the same text. Medians, with minimum and maximum
    in brackets. In a checkout, python -m benchmarks measures the paper's tables."""
    options.check_model_options(args)
    for context in args.contexts or [0]:
        check_integer("contexts", context, 2)
    if args.prompt_file is None:
        stories = resources.files("tokenswift").joinpath("data", "prompts").iterdir()
        named = {one.name: one.read_text(encoding="utf-8") for one in stories}
        text = "\n\n".join(named[name] for name in sorted(named))
    else:
        text = read_named(args.prompt_file, "--prompt-file")
    record = check_record(args.json)
    with options.load_model(args) as llm:
        from tokenswift.loader.identity import versions

        prompts = [prompt(llm, text, context, args) for context in args.contexts]
        heads = llm.resources.heads
        made = {"model": llm.name, "dtype": llm.dtype, "device": llm.device, "versions": versions()}
        made |= {name: getattr(args, name) for name in ("repeats", "max_new_tokens")}
        made["heads"] = None if heads is None else heads.kind
        made["contexts"] = [measure(llm, ids, args) for ids in prompts]
    give(record, made, shown(made))
    return 0


def prompt(llm: Any, text: str, context: int, args: argparse.Namespace) -> list[int]:
    """The beginning of the text.

    Raises:
        InputError: it is too short, or the model has too few positions.
    """
    ids = llm.encode(text[: LETTERS * context])[:context]
    given, limit = f"contexts is {context}", llm.target.rotary.limit
    if len(ids) < context:
        has = counted(len(ids), "token")
        raise InputError(f"{given}, the text has {has}; valid: fewer, or a longer prompt_file")
    if limit is not None and context + args.max_new_tokens > limit:
        more = f"{given}, with new tokens more than the model's {limit} positions"
        raise InputError(f"{more}; valid: fewer, or rope_scaling yarn")
    return ids


def measure(llm: Any, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Everything after one prompt: rates of each kind in the order in which they were measured, and their
    spread; whether both ways of decoding wrote the same tokens. They take turns, forth and back, so that
    neither is always first; what warms them up does not count."""
    logger.info("measuring after %s tokens", f"{len(ids):,}")
    states = [llm.prefill(ids) for _ in range(1 + args.repeats)]
    written = set[tuple[int, ...]]()
    rates: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for turn in range(1 + args.repeats):
        for name in sorted(STRATEGIES, reverse=turn % 2 == 0):
            how = {"sampling": SamplingParams(), "ignore_eos": True}
            done = states[-1].generate(args.max_new_tokens, STRATEGIES[name], **how)
            written.add(tuple(done.token_ids))
            rates[name].append(done.metrics.tokens_per_second)
    plain, adaptive = rates["plain"][1:], rates["adaptive"][1:]
    return {
        "context": len(ids),
        "prompt_tokens_per_second": spread([len(ids) / state.seconds for state in states[1:]]),
        "tokens_per_second": {"plain": spread(plain), "adaptive": spread(adaptive)},
        "speedup": spread([b / a for a, b in zip(plain, adaptive, strict=True)]),
        "identical": len(written) == 1,
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least and most, and all of them."""
    return {"median": median(values), "least": min(values), "most": max(values), "times": values}


def shown(made: dict[str, Any]) -> str:
    """A record as a table."""
    rows = []
    for one in made["contexts"]:
        rates = [one["prompt_tokens_per_second"], *one["tokens_per_second"].values()]
        same = "yes" if one["identical"] else "no"
        rows.append([f"{one['context']:,}", *map(cell, rates), cell(one["speedup"], 2), same])
    head = ("context", "prompt, tokens/s", "plain, tokens/s", "adaptive, tokens/s", "×", "identical")
    first = f"{made['model']}: {made['dtype']} on {made['device']}, {made['heads'] or 'no'} heads; "
    first += f"{made['repeats']} repeats, {made['max_new_tokens']} new tokens"
    return f"{first}\n\n{table(rows, head, right=range(5))}"


def cell(found: dict[str, Any], digits: int = 1) -> str:
    """Median (least–most)."""
    return "{:,.{d}f} ({:,.{d}f}–{:,.{d}f})".format(*list(found.values())[:3], d=digits)
