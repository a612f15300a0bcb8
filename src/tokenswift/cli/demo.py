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
WARM, TRIAL = 8, 64  # tokens that are written, and read, before anything is measured
LIST, NEW = 600, 384  # tokens of the list that is continued, and of each text, at most
READING, WRITING = 20, 25  # seconds that a prompt, and each of the four texts, may take
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Demo(options.Quiet):
    """What is compared.

    Attributes:
        out: folder for the records: autoregressive.json and auto.json of the story,
            list.autoregressive.json and list.auto.json of the list; created if missing
        max_new_tokens: tokens to write of each text, at least 1; default: 384, or as many as this machine
            writes in three minutes
        seed: 0 or more
    """

    out: str = option("demo", "DIR")
    max_new_tokens: int | None = option(None, least=1)
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
    greedy = replace(sampling, greedy=True, repetition_penalty=1.0)
    repeating = llm.encode(repeating_list(LIST))[:LIST]
    texts = {"": ("prose", llm.encode(story), sampling), "list.": ("list", repeating, greedy)}
    length, new = sizes(llm, repeating)
    rows: list[tuple[str, ...]] = []
    accounts, different = [], []
    for text, (words, ids, how) in texts.items():
        ids = ids[-length:]
        end = llm.tokenizer.decode(ids)[-60:].partition(" ")[2].replace("\n", " ")
        say(f"\n--- {words}: …{end}\n")
        results = both(llm, ids, how, args, args.max_new_tokens or new)
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


def sizes(llm: Any, ids: list[int]) -> tuple[int, int]:
    """Tokens of a prompt and of a text, so that the model has the positions and all takes three minutes at
    most. What is tried for it warms both ways of decoding up."""
    trial = llm.prefill(ids[:TRIAL])
    for name in (*STRATEGIES, "autoregressive"):
        rate = trial.generate(WARM, name, ignore_eos=True).metrics.tokens_per_second
    limit = llm.target.rotary.limit or LIST + NEW
    length = min(limit // 2, max(TRIAL, int(READING / trial.seconds * TRIAL)))
    return length, min(NEW, limit - length, max(WARM, int(WRITING * rate)))


def both(
    llm: Any, ids: list[int], sampling: SamplingParams, args: argparse.Namespace, new: int
) -> dict[str, Generation]:
    """One text by each strategy, shown as plain decoding writes it."""
    from tokenswift.engine.request import Request

    made, known = {}, llm.prefill(ids)
    for name in STRATEGIES:
        request = Request(ids, new, name, {}, sampling=sampling, ignore_eos=True)
        sink = TextSink(None, name == "autoregressive")
        made[name] = stream(llm, request, sink, args.quiet, known=known)
    return made


def row(words: str, name: str, result: Generation, plain: Generation) -> tuple[str, ...]:
    """The figures of a text; times are those of plain decoding."""
    rate, length = result.metrics.tokens_per_second, result.metrics.mean_acceptance_length
    over = rate / plain.metrics.tokens_per_second
    return STRATEGIES[name], words, f"{rate:.1f}", f"{over:.2f}", f"{length:.2f}"
