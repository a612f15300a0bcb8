"""``tokenswift demo``: plain decoding and adaptive drafting on prose and on a text that repeats itself."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.generate import stream
from tokenswift.cli.output import TextSink, check_folder, write_json
from tokenswift.cli.terminal import say, table
from tokenswift.config import SamplingParams
from tokenswift.engine.request import record_of
from tokenswift.types import Generation, RunError

STRATEGIES = {"autoregressive": "plain", "auto": "adaptive"}
WARM = 8  # tokens that are written before anything is measured
LIST = 600  # tokens of the list that is continued
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Demo(options.Shown):
    """What is compared.

    Attributes:
        out: folder for the records: autoregressive.json and auto.json of the story,
            list.autoregressive.json and list.auto.json of the list; created if missing
        max_new_tokens: tokens to write of each text, at least 1
        seed: 0 or more
    """

    out: str = option("demo", "DIR")
    max_new_tokens: int = option(384, least=1)
    seed: int = option(0)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "demo", run, "compare plain decoding and TokenSwift on two texts")
    add_options(parser, Demo)
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Continue the shipped story, and a list that repeats itself (greedy, no penalty), each twice with the
    same seed: by plain decoding, then with drafts. Print the texts, a table, and whether every token is the
    same (exit code 1 if not). Four records with tokens, text and figures are written to --out."""
    sampling = SamplingParams(seed=args.seed)
    options.check_model_options(args)
    folder = check_folder("--out", args.out)
    files = {(text, name): folder / f"{text}{name}.json" for text in ("", "list.") for name in STRATEGIES}
    story = resources.files("tokenswift").joinpath("data/demo_prompt.txt").read_text(encoding="utf-8").strip()
    logger.info("writing two texts, each by plain decoding and by adaptive drafting")
    llm = options.load_model(args)
    repeating = llm.encode(repeating_list(LIST))[:LIST]
    greedy = replace(sampling, greedy=True, repetition_penalty=1.0)
    texts = {"": ("prose", llm.encode(story), sampling), "list.": ("list", repeating, greedy)}
    rows: list[tuple[str, ...]] = []
    accounts, different = [], []
    for text, (words, ids, how) in texts.items():
        end = llm.tokenizer.decode(ids)[-60:].partition(" ")[2].replace("\n", " ")
        say(f"\n--- {words}: …{end}\n")
        results = both(llm, ids, how, args)
        folder.mkdir(parents=True, exist_ok=True)
        for name, result in results.items():
            write_json(files[text, name], record_of(llm, result, name, {}, how))
            rows.append(row(words, name, result, results["autoregressive"]))
        if (drafting := results["auto"].drafting) is not None:
            accounts.append(f"drafting, {words}: {drafting['summary']}")
        if results["auto"].token_ids != results["autoregressive"].token_ids:
            different.append(words)
    head = ("strategy", "text", "tokens/s", "over plain", "tokens a pass")
    left = ", ".join(path.name for path in files.values())
    same = f"identical: {'no' if different else 'yes'}"
    left = f"left in {folder}: {left} (tokens, text and figures of each)\n"
    say("\n".join(["", table(rows, head, right=range(2, 5)), *accounts, same, left]))
    if different:
        near = "" if llm.dtype == "float32" else f" (near-ties flip in {llm.dtype}; compare in float32)"
        raise RunError(f"the two texts differ ({different[0]}); all records are in {folder}{near}")
    return 0


def repeating_list(length: int) -> str:
    """A list that repeats itself, of at least so many tokens."""
    goods = ("pears", "apples", "lamps", "ropes", "coats", "nails")
    lines = (f"{i}. {goods[i % 6]}: {10 + i % 6} boxes, shelf {i % 4}\n" for i in range(1, length))
    return "".join(lines)


def both(llm: Any, ids: list[int], sampling: SamplingParams, args: Any) -> dict[str, Generation]:
    """One text by each strategy, shown as plain decoding writes it."""
    from tokenswift.engine.request import Request

    made = {}
    for name in STRATEGIES:
        request = Request(ids, args.max_new_tokens, name, {}, sampling=sampling, ignore_eos=True)
        llm.generate(ids[-WARM:], WARM, name, sampling=sampling, ignore_eos=True)
        sink = TextSink(None, name == "autoregressive", args.raw_output)
        made[name] = stream(llm, request, sink, args.quiet)
    return made


def row(words: str, name: str, result: Generation, plain: Generation) -> tuple[str, ...]:
    """The figures of a text; times are those of plain decoding."""
    rate, length = result.metrics.tokens_per_second, result.metrics.mean_acceptance_length
    over = rate / plain.metrics.tokens_per_second
    return STRATEGIES[name], words, f"{rate:.1f}", f"{over:.2f}", f"{length:.2f}"
