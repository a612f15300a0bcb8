"""``tokenswift bench``: how fast this model is on this machine, by context: its prompt, plain decoding,
adaptive drafting, and passes of several rows."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median as middle
from time import perf_counter
from typing import Any

from tokenswift.checks import check_integer
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, option
from tokenswift.cli.output import add_json_option, check_record, give
from tokenswift.cli.prompting import read_named, token_ids
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
        rows: tokens that a pass verifies, several with commas
        repeats: how often each is measured, after a warm-up
        max_new_tokens: tokens to write each time, at least 1
        prompt_file: text to continue; default: the stories that come with the library
        seed: of the text that is written, 0 or more
    """

    contexts: list[int] = option((1024, 4096), "N,N,…", type=token_ids)
    rows: list[int] = option((1, 4, 8, 16), "N", type=token_ids)
    repeats: int = option(5, least=1)
    max_new_tokens: int = option(64, least=1)
    prompt_file: str | None = option(None, "F")
    seed: int = option(0, least=0)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the speed of a model on this machine",
        description="Measure a model on this machine: prompt tokens per second; tokens per second of plain "
        "decoding and of adaptive drafting, in turns, with the same prompt and the same text; and the time "
        "of a pass that verifies several tokens. Medians, with minimum and maximum in brackets. In a "
        "checkout, python -m benchmarks measures the paper's tables.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.",
    )
    options.add_model_options(parser)
    add_options(parser.add_argument_group("measurement"), Measured)
    group = parser.add_argument_group("results")
    add_json_option(group, "write all measured times to this file")
    add_options(group, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check; load; measure each context; print."""
    options.check_model_options(args)
    for name in ("contexts", "rows"):
        for value in getattr(args, name) or [0]:
            check_integer(name, value, 2 if name == "contexts" else 1)
    if args.prompt_file is None:
        stories = resources.files("tokenswift").joinpath("data", "prompts").iterdir()
        texts = [one.read_text(encoding="utf-8") for one in sorted(stories, key=lambda one: one.name)]
        text = "\n\n".join(texts)
    else:
        text = read_named(args.prompt_file, "--prompt-file")
    record = check_record(args.json, {"--prompt-file": args.prompt_file})
    with options.load_model(args) as llm:
        ids = {context: prompt(llm, text, context, args) for context in args.contexts}
        made = about(llm, args)
        for context in args.contexts:
            logger.info("measuring after %s tokens", f"{context:,}")
            made["contexts"].append(measure(llm, ids[context], args))
    give(record, made, shown(made))
    return 0


def prompt(llm: Any, text: str, context: int, args: argparse.Namespace) -> list[int]:
    """The beginning of the text.

    Raises:
        InputError: it is too short, or the model has too few positions.
    """
    ids = llm.encode(text[: LETTERS * context])[:context]
    if len(ids) < context:
        raise InputError(
            f"contexts is {context}, the text has {counted(len(ids), 'token')}; valid: fewer, or a longer "
            "prompt_file"
        )
    limit = llm.target.rotary.limit
    if limit is not None and context + max(args.max_new_tokens, *args.rows) > limit:
        raise InputError(
            f"contexts is {context}, with new tokens more than the model's {limit} positions; valid: fewer, "
            "or rope_scaling yarn"
        )
    return ids


def about(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What the record says beside measurements."""
    import torch

    from tokenswift.loader.identity import versions

    heads = llm.resources.heads
    return {
        "model": llm.name,
        "dtype": llm.dtype,
        "device": llm.device,
        "threads": torch.get_num_threads(),
        "heads": None if heads is None else {"kind": heads.kind, "file": Path(heads.source).name},
        "weight_bytes": llm.target.weight_bytes,
        "repeats": args.repeats,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "versions": versions(),
        "contexts": [],
    }


def measure(llm: Any, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Everything after one prompt: ``times`` of each kind in the order in which they were measured, and their
    spread; whether both ways of decoding wrote the same tokens. They take turns, forth and back, so that
    neither is always first; what warms them up does not count."""
    states = [llm.prefill(ids) for _ in range(1 + args.repeats)]
    sampling, written = SamplingParams(seed=args.seed), set[tuple[int, ...]]()
    rates: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for turn in range(1 + args.repeats):
        for name in list(STRATEGIES)[:: -1 if turn % 2 else 1]:
            done = states[-1].generate(args.max_new_tokens, STRATEGIES[name], {}, sampling, ignore_eos=True)
            written.add(tuple(done.token_ids))
            rates[name].append(done.metrics.tokens_per_second)
    rates = {name: values[1:] for name, values in rates.items()}
    passes = {rows: pass_times(llm.target, len(ids), rows, args.repeats) for rows in args.rows}
    return {
        "context": len(ids),
        "prompt_tokens_per_second": spread([len(ids) / state.seconds for state in states[1:]]),
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "speedup": spread([b / a for a, b in zip(rates["plain"], rates["adaptive"], strict=True)]),
        "identical": len(written) == 1,
        "passes": [{"rows": rows, "milliseconds": spread(values)} for rows, values in passes.items()],
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least and most, and all of them."""
    return {"median": middle(values), "least": min(values), "most": max(values), "times": values}


def shown(made: dict[str, Any]) -> str:
    """A record as tables."""
    heads = made["heads"]["kind"] + " heads" if made["heads"] else "no heads"
    threads = [counted(made["threads"], "thread")] if made["device"] == "cpu" else []
    place = ", ".join([f"{made['dtype']} on {made['device']}", *threads, heads])
    counts = f"{made['repeats']} repeats, {made['max_new_tokens']} new tokens"
    speeds, passes = [], []
    for one in made["contexts"]:
        kinds = one["prompt_tokens_per_second"], *one["tokens_per_second"].values()
        cells = [*map(cell, kinds), cell(one["speedup"], 2), "yes" if one["identical"] else "no"]
        speeds.append([f"{one['context']:,}", *cells])
        passes.append([f"{one['context']:,}", *(cell(row["milliseconds"], 2) for row in one["passes"])])
    head = ("context", "prompt, tokens/s", *(f"{name}, tokens/s" for name in STRATEGIES), "×", "identical")
    rows = [f"{counted(entry['rows'], 'row')}, ms" for entry in made["contexts"][0]["passes"]]
    first = f"{made['model']}: {place}; {made['weight_bytes'] / 1e6:,.0f} MB of weights a pass; {counts}"
    tables = table(speeds, head, right=range(6)), table(passes, ("context", *rows), right=range(99))
    return "\n\n".join([first, *tables])


def cell(found: dict[str, Any], digits: int = 1) -> str:
    """Median (least–most)."""
    return "{:,.{d}f} ({:,.{d}f}–{:,.{d}f})".format(*list(found.values())[:3], d=digits)


# ---- the clock of all measurements that are no generation --------------------------------------------------


def times(work: Callable[[], object], runs: int = 5, least: float = 0.0) -> list[float]:
    """Milliseconds of each call after a first one, work on an accelerator included: at least ``runs``, until
    ``least`` seconds are over."""
    import torch

    found: list[float] = []
    end = perf_counter() + least
    while len(found) <= runs or perf_counter() < end:
        begun = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(1e3 * (perf_counter() - begun))
    return found[1:]


def median(values: list[float]) -> float:
    """The median, rounded to four digits."""
    return round(middle(values), 4)


def pass_times(target: Any, context: int, rows: int, runs: int) -> list[float]:
    """Milliseconds of a pass of some rows (a chain of drafts) with its logits, behind a context.

    Args:
        target: a loaded model (`models.target.Target`).
    """
    import torch

    cache = target.new_cache(context + rows)
    cache.fill_random()  # what keys hold costs nothing
    cache.commit(tuple(range(context)))
    tokens = torch.arange(rows, device=target.device) % target.vocab_size
    positions = torch.arange(context, context + rows, device=target.device)
    parents = None if rows == 1 else list(range(-1, rows - 1))
    return times(lambda: target.logits(target.forward(tokens, positions, cache, parents).hidden), runs)
