"""``tokenswift bench``: how fast this model is on this machine, by context: its prompt, plain decoding,
adaptive drafting, and passes of several rows."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from tokenswift.checks import check_integer
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option, texts_of
from tokenswift.cli.generate import Length
from tokenswift.cli.inputs import token_ids
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.tables import table
from tokenswift.config import SamplingParams
from tokenswift.loader.rope import parse_rope_scaling
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
STRATEGIES = {"plain": "autoregressive", "adaptive": "auto"}
MODEL = ("model", "dtype", "weights", "activations", "kv_cache_dtype", "device", "threads", "heads")
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
    group = parser.add_argument_group("model")
    add_options(group, options.Model, only=MODEL)
    add_options(group, Length, only=("rope_scaling",))
    shown = {"contexts": "1024,4096", "rows": "1,4,8,16"}
    texts = {name: f"{texts_of(Measured)[name]}; default: {value}" for name, value in shown.items()}
    add_options(parser.add_argument_group("measurement"), Measured, texts=texts)
    group = parser.add_argument_group("results")
    add_json_option(group, "write all measured times to this file")
    add_options(group, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Check; load; measure each context; print."""
    args.backend, args.cuda_graphs = "auto", "auto"
    parse_rope_scaling(args.rope_scaling)
    options.check_model_options(args)
    check_options(args, Measured)
    for name in ("contexts", "rows"):
        for value in getattr(args, name) or [0]:
            check_integer(name, value, 2 if name == "contexts" else 1)
    text, record = text_of(args.prompt_file), check_record(args.json, {"--prompt-file": args.prompt_file})
    with options.load_model(args, args.rope_scaling) as llm:
        ids = {context: prompt(llm, text, context, args) for context in args.contexts}
        made = about(llm, args)
        for context in args.contexts:
            logger.info("measuring after %s tokens", f"{context:,}")
            made["contexts"].append(measure(llm, ids[context], args))
    if record is not None:
        write_json(record, made)
    if record != STDOUT:
        print(shown(made), flush=True)
    return 0


def text_of(file: str | None) -> str:
    """The text to go on from.

    Raises:
        InputError: the file cannot be read.
    """
    if file is not None:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"prompt_file {file} cannot be read ({error})") from error
    stories = resources.files("tokenswift").joinpath("data", "prompts").iterdir()
    return "\n\n".join(one.read_text(encoding="utf-8") for one in sorted(stories, key=lambda one: one.name))


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
    rows, limit = max(args.rows), llm.target.rotary.limit
    if limit is not None and context + max(args.max_new_tokens, rows) > limit:
        raise InputError(
            f"contexts is {context}, with new tokens more than the model's {limit} positions; valid: fewer, "
            "or rope_scaling yarn"
        )
    return ids


def about(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What the record says beside measurements."""
    import torch

    from tokenswift.loader.identity import versions

    place = {"model": llm.name, "dtype": llm.dtype, "device": llm.device, "threads": torch.get_num_threads()}
    heads = llm.resources.heads
    used = None if heads is None else {"kind": heads.kind, "file": Path(heads.source).name}
    how = {"repeats": args.repeats, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
    weights = llm.target.weight_bytes
    return {**place, "heads": used, "weight_bytes": weights, **how, "versions": versions(), "contexts": []}


def measure(llm: Any, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Everything after one prompt: ``times`` of each kind in the order in which they were measured, and their
    spread; whether both ways of decoding wrote the same tokens."""
    from tokenswift.cli.timer import pass_times

    states = [llm.prefill(ids) for _ in range(1 + args.repeats)]
    sampling, written = SamplingParams(seed=args.seed), set[tuple[int, ...]]()

    def rate(name: str) -> float:
        state, strategy = states[-1], STRATEGIES[name]
        done = state.generate(args.max_new_tokens, strategy, {}, sampling, ignore_eos=True)
        written.add(tuple(done.token_ids))
        return done.metrics.tokens_per_second

    rates = in_turns(list(STRATEGIES), rate, args.repeats)
    pairs = zip(rates["plain"], rates["adaptive"], strict=True)
    passes = {rows: pass_times(llm.target, len(ids), rows, args.repeats) for rows in args.rows}
    return {
        "context": len(ids),
        "prompt_tokens_per_second": spread([len(ids) / state.seconds for state in states[1:]]),
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "speedup": spread([adaptive / plain for plain, adaptive in pairs]),
        "identical": len(written) == 1,
        "passes": [{"rows": rows, "milliseconds": spread(values)} for rows, values in passes.items()],
    }


def in_turns(names: Sequence[str], measured: Callable[[str], float], repeats: int) -> dict[str, list[float]]:
    """What each says in each round, forth and back, so that none is always first; a first round does not
    count."""
    found: dict[str, list[float]] = {name: [] for name in names}
    order = list(names)
    for turn in range(1 + repeats):
        for name in order:
            value = measured(name)
            found[name] += [value] if turn else []
        order.reverse()
    return found


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least and most, and all of them."""
    return {"median": median(values), "least": min(values), "most": max(values), "times": values}


def shown(made: dict[str, Any]) -> str:
    """A record as tables."""
    heads = made["heads"]["kind"] + " heads" if made["heads"] else "no heads"
    threads = f"{made['threads']} thread{'s' if made['threads'] > 1 else ''}" * (made["device"] == "cpu")
    place = ", ".join(filter(None, (f"{made['dtype']} on {made['device']}", threads, heads)))
    counts = f"{made['repeats']} repeats, {made['max_new_tokens']} new tokens"
    speeds, passes = [], []
    for one in made["contexts"]:
        rates = one["tokens_per_second"]
        cells = [cell(one["prompt_tokens_per_second"]), *map(cell, rates.values()), cell(one["speedup"], 2)]
        speeds.append([f"{one['context']:,}", *cells, "yes" if one["identical"] else "no"])
        times = [cell(entry["milliseconds"], 2) for entry in one["passes"]]
        passes.append([f"{one['context']:,}", *times])
    head = ("context", "prompt, tokens/s", *(f"{name}, tokens/s" for name in STRATEGIES), "×", "identical")
    rows = [entry["rows"] for entry in made["contexts"][0]["passes"]]
    return "\n".join(
        [
            f"{made['model']}: {place}; {made['weight_bytes'] / 1e6:,.0f} MB of weights a pass; {counts}",
            "",
            table(speeds, head, right=range(6)),
            "",
            table(passes, ("context", *(f"{n} row{'s' * (n > 1)}, ms" for n in rows)), right=range(99)),
        ]
    )


def cell(found: dict[str, Any], digits: int = 1) -> str:
    """Median (least–most)."""
    middle, least, most = (f"{found[name]:,.{digits}f}" for name in ("median", "least", "most"))
    return f"{middle} ({least}–{most})"
