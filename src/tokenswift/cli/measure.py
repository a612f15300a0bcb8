"""``tokenswift bench``, ``demo``, ``plan`` and ``audit``: how fast a model is on this machine, what
a run will take, and that drafting changes no token."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import Annotated, Any

from tokenswift.checks import check_integer, counted
from tokenswift.cli import options
from tokenswift.cli.audit import Audited, audit
from tokenswift.cli.call import add_call_options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.plan import Plan, plan
from tokenswift.cli.prompts import TOKEN_IDS, read_named
from tokenswift.cli.results import check_record, give
from tokenswift.cli.terminal import say, table
from tokenswift.config.fields import SHOWN, AtLeast, Option
from tokenswift.config.sampling import SamplingParams
from tokenswift.turns import take_turns
from tokenswift.types import Generation, InputError, RunError, Step

logger = logging.getLogger("tokenswift")

STRATEGIES = ("autoregressive", "auto")
LETTERS = 16  # characters of a token at most: what of a text is tokenized
WARM, TRIAL = 8, 64  # tokens that are written, and read, before anything is measured in a demo
LIST, NEW = (
    600,
    384,
)  # tokens of the demo's list that is continued, and of each of its texts, at most
READING, WRITING = 20, 25  # seconds that a prompt, and each of the demo's four texts, may take


CONTEXTS_OPTION = replace(TOKEN_IDS, metavar="N,N,…", shown=True)


@dataclass(frozen=True)
class Measured(options.Record):
    """What is measured.

    Attributes:
        contexts: lengths of the prompt in tokens, several with commas
        repeats: how often each is measured, after a warm-up
        max_new_tokens: tokens to write each time, at least 1
        prompt_file: text to continue; default: the stories that come with the library
    """

    contexts: Annotated[Sequence[int], CONTEXTS_OPTION] = (1024, 4096)
    repeats: Annotated[int, AtLeast(1), SHOWN] = 5
    max_new_tokens: Annotated[int, AtLeast(1), Option(shown=True, short="-n")] = 64
    prompt_file: Annotated[str | None, Option("F", shown=True)] = None


@dataclass(frozen=True)
class Demo(options.Record):
    """What is compared.

    Attributes:
        max_new_tokens: tokens to write of each text, at least 1; default: 384, or as many as this
            machine writes in three minutes
    """

    max_new_tokens: Annotated[int | None, AtLeast(1), Option(shown=True, short="-n")] = None


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommands."""
    for name, run, kind, words in (
        ("bench", bench, Measured, "measure the speed of a model on this machine"),
        ("demo", demo, Demo, "compare plain decoding and TokenSwift on two texts"),
    ):
        parser = command(subparsers, name, run, words)
        add_options(parser, kind)
        options.add_model_options(parser)
    parser = command(subparsers, "plan", plan, "estimate memory and time of a run", "[PROMPT]")
    add_call_options(parser)
    add_options(parser.add_argument_group("results"), Plan)
    words = "check that every strategy writes the tokens of plain decoding"
    parser = command(subparsers, "audit", audit, words, "[PROMPT]")
    add_options(parser, Audited)
    options.add_model_options(parser, dtype="float32")
    options.add_strategy_options(parser, "all")
    options.add_sampling_options(parser, "sampling (defaults: the paper's)", plain=True)
    add_options(parser.add_argument_group("results"), options.Record)


# ---- bench ---------------------------------------------------------------------------------------


def bench(args: argparse.Namespace) -> int:
    """Measure a model on this machine: prompt tokens per second, and tokens per second of plain
    decoding and of adaptive drafting, in turns, with the same prompt and the same text. Medians,
    with minimum and maximum in brackets. In a checkout, python -m benchmarks measures the paper's
    tables."""
    options.check_model_options(args)
    for context in args.contexts or [0]:
        check_integer("contexts", context, 2)
    if args.prompt_file is None:
        stories = resources.files("tokenswift").joinpath("data", "prompts").iterdir()
        text = "\n\n".join(
            one.read_text("utf-8") for one in sorted(stories, key=lambda one: one.name)
        )
    else:
        text = read_named(args.prompt_file, "--prompt-file")
    record = check_record(args.json)
    with options.load_model(args) as llm:
        from tokenswift.loader.identity import versions

        prompts = [beginning(llm, text, context, args) for context in args.contexts]
        heads = llm.resources.heads
        made = {"model": llm.name, "dtype": llm.dtype, "device": llm.device, "versions": versions()}
        made |= {name: getattr(args, name) for name in ("repeats", "max_new_tokens")}
        made["heads"] = None if heads is None else heads.kind
        how = (args.max_new_tokens, args.repeats, SamplingParams())
        made["contexts"] = [measure(llm, ids, *how) for ids in prompts]
    give(record, made, rates_of(made))
    return 0


def beginning(llm: Any, text: str, context: int, args: argparse.Namespace) -> list[int]:
    """The beginning of the text.

    Raises:
        InputError: it is too short, or the model has too few positions.
    """
    ids = llm.encode(text[: LETTERS * context])[:context]
    if len(ids) < context:
        has = counted(len(ids), "token")
        raise InputError(
            f"contexts is {context}, the text has {has}; valid: fewer, or a longer prompt_file"
        )
    llm.target.check_room(context + args.max_new_tokens)
    return ids


def measure(
    llm: Any,
    ids: list[int],
    new: int,
    repeats: int,
    sampling: SamplingParams,
    warm: int = 1,
    on_step: Callable[[Step], None] | None = None,
) -> dict[str, Any]:
    """Everything after one prompt: rates of each kind in the order in which they were measured;
    whether both ways of decoding wrote the same tokens. They take turns, forth and back, so that
    neither is always first.

    Args:
        new: tokens to write each time.
        warm: turns that do not count, before the others.
        on_step: gets the steps of plain decoding.
    """
    logger.info("measuring after %s tokens", f"{len(ids):,}")
    states = [llm.prefill(ids) for _ in range(warm + repeats)]
    made: dict[str, list[Generation]] = {name: [] for name in STRATEGIES}
    for _, name in take_turns(STRATEGIES, range(warm + repeats)):
        made[name].append(
            states[-1].generate(
                new,
                name,
                sampling=sampling,
                ignore_eos=True,
                on_step=on_step if name == "autoregressive" else None,
            )
        )
    plain, adaptive = ([one.metrics for one in made[name][warm:]] for name in STRATEGIES)
    return {
        "context": len(ids),
        "prompt_tokens_per_second": [len(ids) / state.seconds for state in states[warm:]],
        "plain_tokens_per_second": [one.tokens_per_second for one in plain],
        "adaptive_tokens_per_second": [one.tokens_per_second for one in adaptive],
        "speedup": [
            b.tokens_per_second / a.tokens_per_second for a, b in zip(plain, adaptive, strict=True)
        ],
        "tokens_a_pass": adaptive[-1].mean_acceptance_length,
        "identical": len({tuple(one.token_ids) for ones in made.values() for one in ones}) == 1,
    }


def rates_of(made: dict[str, Any]) -> str:
    """A record as a table."""
    rows = []
    for one in made["contexts"]:
        rates = [cell(one[f"{name}_tokens_per_second"]) for name in ("prompt", "plain", "adaptive")]
        same = "yes" if one["identical"] else "no"
        rows.append([f"{one['context']:,}", *rates, cell(one["speedup"], 2), same])
    head = (
        "context",
        "prompt, tokens/s",
        "plain, tokens/s",
        "adaptive, tokens/s",
        "×",
        "identical",
    )
    first = f"{made['model']}: {made['dtype']} on {made['device']}, {made['heads'] or 'no'} heads; "
    first += f"{made['repeats']} repeats, {made['max_new_tokens']} new tokens"
    return f"{first}\n\n{table(head, rows, right=range(5))}"


def cell(times: list[float], digits: int = 1) -> str:
    """Median (least–most)."""
    return "{:,.{d}f} ({:,.{d}f}–{:,.{d}f})".format(median(times), min(times), max(times), d=digits)


# ---- demo ----------------------------------------------------------------------------------------


def demo(args: argparse.Namespace) -> int:
    """Continue the shipped story, and a list that repeats itself (greedy, no penalty), each twice
    with the same seed: by plain decoding, then with drafts. Print the texts, a table, and whether
    every token is the same (exit code 1 if not)."""
    options.check_model_options(args)
    record = check_record(args.json)
    story = (
        resources.files("tokenswift")
        .joinpath("data/demo_prompt.txt")
        .read_text(encoding="utf-8")
        .strip()
    )
    logger.info("writing two texts, each by plain decoding and by adaptive drafting")
    llm = options.load_model(args)
    greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
    repeating = llm.encode(repeating_list(LIST))[:LIST]
    length, new = sizes(llm, repeating)
    rows, made = list[tuple[str, ...]](), dict[str, Any]()
    for words, ids, how in (
        ("prose", llm.encode(story), SamplingParams()),
        ("list", repeating, greedy),
    ):
        ids = ids[-length:]
        say(f"\n--- …{llm.tokenizer.decode(ids)[-60:]}\n")
        one = measure(llm, ids, args.max_new_tokens or new, 1, how, 0, lambda step: say(step.text))
        say("\n")
        plain, adaptive = one["plain_tokens_per_second"][0], one["adaptive_tokens_per_second"][0]
        over, length_of_step = one["speedup"][0], one["tokens_a_pass"]
        rows.append(("plain", words, f"{plain:.1f}", "1.00", "1.00"))
        rows.append(("adaptive", words, f"{adaptive:.1f}", f"{over:.2f}", f"{length_of_step:.2f}"))
        made[words] = one
    same = all(one["identical"] for one in made.values())
    head = ("strategy", "text", "tokens/s", "over plain", "tokens a pass")
    give(
        record,
        made,
        f"{table(head, rows, right=range(2, 5))}\nidentical: {'yes' if same else 'no'}",
    )
    if not same:
        near = (
            ""
            if llm.dtype == "float32"
            else f" (near-ties flip in {llm.dtype}; compare in float32)"
        )
        raise RunError(f"the two texts differ{near}")
    return 0


def repeating_list(length: int) -> str:
    """A list that repeats itself, of at least so many tokens."""
    goods = ("pears", "apples", "lamps", "ropes", "coats", "nails")
    lines = (f"{i}. {goods[i % 6]}: {10 + i % 6} boxes, shelf {i % 4}\n" for i in range(1, length))
    return "".join(lines)


def sizes(llm: Any, ids: list[int]) -> tuple[int, int]:
    """Tokens of a prompt and of a text, so that the model has the positions and all takes three
    minutes at most. What is tried for it warms both ways of decoding up."""
    trial = llm.prefill(ids[:TRIAL])
    for name in (*STRATEGIES, "autoregressive"):
        rate = trial.generate(WARM, name, ignore_eos=True).metrics.tokens_per_second
    limit = llm.target.rotary.limit or LIST + NEW
    length = min(limit // 2, max(TRIAL, int(READING / trial.seconds * TRIAL)))
    return length, min(NEW, limit - length, max(WARM, int(WRITING * rate)))
