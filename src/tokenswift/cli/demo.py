"""``tokenswift demo``: plain decoding and adaptive drafting in turns, on prose and on a text that repeats
itself."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from signal import SIGINT
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.output import TextSink, check_folder, check_writable, write_json
from tokenswift.cli.progress import Progress, Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.cli.tables import table
from tokenswift.config import SamplingParams
from tokenswift.engine.records import record_of
from tokenswift.types import Generation, RunError, Step

STRATEGIES = ("autoregressive", "auto")
NAMES = {"autoregressive": "plain", "auto": "adaptive"}
TURN, TURNS = 16, 32  # least tokens that one writes before the other goes on, and most turns
WARM = 8  # tokens that each writes before
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
    max_new_tokens: int = option(384, earlier="--tokens", least=1)
    seed: int = option(0)


@dataclass(slots=True)
class Side:
    """One way of decoding a text.

    Attributes:
        steps: what it takes.
        seconds: of the steps so far.
        count: new tokens so far.
    """

    steps: Any
    seconds: float = 0.0
    count: int = 0

    def run_to(self, tokens: int) -> Iterator[Step]:
        """Decode until there are so many tokens."""
        while self.count < tokens:
            step = next(self.steps)
            self.seconds += step.seconds
            self.count += len(step.token_ids)
            yield step


@dataclass(slots=True)
class Outcome:
    """What came of a text.

    Attributes:
        results, rates: by strategy.
    """

    results: dict[str, Generation]
    rates: dict[str, float]

    @property
    def same(self) -> bool:
        """Whether both are the same tokens."""
        return self.results["autoregressive"].token_ids == self.results["auto"].token_ids


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="compare plain decoding and TokenSwift on two texts",
        description="Continue the shipped story, and a list that repeats itself (greedy, no penalty), each "
        "twice with the same seed: by plain decoding and with drafts, some tokens at a time in turns. Print "
        "the texts, a table, and whether every token is the same (exit code 1 if not). Four records "
        "with tokens, text and figures are written to --out.",
    )
    add_options(parser, Demo)
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Write both texts, compare, keep the records."""
    check_options(args, Demo)
    sampling = SamplingParams(seed=args.seed)
    options.check_model_options(args)
    folder = check_folder("--out", args.out)
    files = {(text, name): folder / f"{text}{name}.json" for text in ("", "list.") for name in STRATEGIES}
    if folder.exists():
        for file in files.values():
            check_writable("--out", file)
    prompt = (
        resources.files("tokenswift").joinpath("data/demo_prompt.txt").read_text(encoding="utf-8").strip()
    )
    logger.info("writing two texts, each by plain decoding and by adaptive drafting in turns")
    llm = options.load_model(args)
    logger.info("%s, %s on %s", llm.name, llm.dtype, llm.device)
    repeating = llm.encode(repeating_list(LIST))[:LIST]
    greedy = replace(sampling, greedy=True, repetition_penalty=1.0)
    texts: dict[str, tuple[str, Any, SamplingParams]] = {
        "": ("prose", llm.encode(prompt), sampling),
        "list.": ("list", repeating, greedy),
    }
    ends = {"": prompt, "list.": llm.tokenizer.decode(repeating)}
    outcomes: dict[str, Outcome] = {}
    for text, (words, ids, how) in texts.items():
        end = ends[text][-60:].partition(" ")[2].replace("\n", " ")
        print(f"\n--- {words}: …{end}", flush=True)
        outcomes[words] = in_turns(llm, ids, how, args)
        folder.mkdir(parents=True, exist_ok=True)
        for name in STRATEGIES:
            record = record_of(llm, outcomes[words].results[name], name, {}, how)
            write_json(files[text, name], record)
    print("\n" + shown(outcomes))
    for words, outcome in outcomes.items():
        drafting = outcome.results["auto"].drafting
        if drafting is not None:
            print(f"drafting, {words}: {drafting['summary']}")
    different = [words for words, outcome in outcomes.items() if not outcome.same]
    print(f"identical: {'no' if different else 'yes'}")
    left = ", ".join(path.name for path in files.values())
    print(f"left in {folder}: {left} (tokens, text and figures of each)")
    sys.stdout.flush()
    if different:
        results = outcomes[different[0]].results
        pairs = zip(*(results[name].token_ids for name in STRATEGIES), strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        raise RunError(
            f"the two texts differ from new token {place} on ({different[0]}); all records are in {folder}"
            + ("" if llm.dtype == "float32" else f" (near-ties flip in {llm.dtype}; compare in float32)")
        )
    return 0


def repeating_list(length: int) -> str:
    """A list that repeats itself, of at least so many tokens."""
    goods = ("pears", "apples", "lamps", "ropes", "coats", "nails")
    lines = (f"{i}. {goods[i % 6]}: {10 + i % 6} boxes, shelf {i % 4}\n" for i in range(1, length))
    return "".join(lines)


def in_turns(llm: Any, ids: list[int], sampling: SamplingParams, args: Any) -> Outcome:
    """Write one text both ways, shown as plain decoding writes it.

    Args:
        ids: the prompt.
    """
    new = args.max_new_tokens
    with Stages(args.quiet, "reading the prompt"):
        base = llm.prefill(ids)
        for name in STRATEGIES:
            base.generate(min(WARM, new), name, {}, sampling, ignore_eos=True)
        sides = {name: Side(base.stream(new, name, {}, sampling, ignore_eos=True)) for name in STRATEGIES}
    sink, order = TextSink(None, raw=args.raw_output), list(sides)
    progress = Progress(new, args.quiet, verbose=args.verbose)
    with Signals() as signals:
        try:
            size = max(TURN, -(-new // TURNS))
            for end in (*range(size, new, size), new):
                for name in order:
                    for step in sides[name].run_to(end):
                        if name == "autoregressive":
                            sink.write(step.text)
                            progress.update(step)
                        signals.check()
                order.reverse()
        except KeyboardInterrupt:
            counts = " and ".join(f"{side.count} by {NAMES[name]}" for name, side in sides.items())
            raise Interrupted(signals.number or SIGINT, f"tokens written: {counts}, {sink.kept}") from None
        finally:
            progress.end()
            for side in sides.values():
                side.steps.close()
    results = {name: side.steps.result for name, side in sides.items()}
    sink.write(results["autoregressive"].text[sink.written :])
    sink.close()
    rates = {name: side.count / side.seconds for name, side in sides.items()}
    return Outcome(results, rates)


def shown(outcomes: dict[str, Outcome]) -> str:
    """Figures of the texts: a row for each way of decoding; times are those of plain decoding."""
    rows = [
        (
            NAMES[name],
            words,
            f"{outcome.rates[name]:.1f}",
            f"{outcome.rates[name] / outcome.rates['autoregressive']:.2f}",
            f"{result.metrics.mean_acceptance_length:.2f}",
        )
        for words, outcome in outcomes.items()
        for name, result in outcome.results.items()
    ]
    return table(rows, ("strategy", "text", "tokens/s", "over plain", "tokens a pass"), right=range(2, 5))
