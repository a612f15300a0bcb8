"""``tokenswift bench``, ``demo``, ``plan`` and ``audit``: how fast a model is on this machine, what
a run will take, and that drafting changes no token."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Annotated, TypedDict

from tokenswift.checks import check_integer, counted
from tokenswift.cli import options
from tokenswift.cli.audit import Audited, audit
from tokenswift.cli.call import add_call_options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.plan import Plan, plan
from tokenswift.cli.prompts import TOKEN_IDS, conversation, read_named
from tokenswift.cli.results import check_record, write_results
from tokenswift.cli.terminal import say, table
from tokenswift.config.fields import SHOWN, AtLeast, Option
from tokenswift.config.sampling import SamplingParams
from tokenswift.loader.default_model import DEFAULT
from tokenswift.turns import take_turns
from tokenswift.types import Generation, InputError, RunError, Step

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")

PLAIN = "autoregressive"
ADAPTIVE = "auto"
TOKEN_LETTERS = 16  # characters of a token at most: that many are tokenized for each

# of a demo
TRIAL_PROMPT = 64  # tokens of a prompt that is prefilled before anything is measured
TRIAL_TOKENS = 8  # new tokens after it
QUESTION = "Write a Python program that keeps a list of books in a file, and explain each part."
LIST_TOKENS = 600  # tokens of the list that is continued
MOST_TOKENS = 384  # new tokens of a text
PREFILL_SECONDS = 20  # that a prompt may take
TEXT_SECONDS = 25  # that each text may take

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


class Measurement(TypedDict):
    """Both ways of decoding after one prompt, as ``--json`` writes them.

    Attributes:
        context: tokens of the prompt.
        prompt_tokens_per_second, plain_tokens_per_second, adaptive_tokens_per_second: of each
            repeat, in the order in which they were measured.
        speedup: adaptive drafting over plain decoding, by repeat.
        tokens_a_pass: of adaptive drafting.
        identical: whether both ways wrote the same tokens, always.
    """

    context: int
    prompt_tokens_per_second: list[float]
    plain_tokens_per_second: list[float]
    adaptive_tokens_per_second: list[float]
    speedup: list[float]
    tokens_a_pass: float
    identical: bool


class BenchRecord(TypedDict):
    """What ``tokenswift bench --json`` writes: the model, its settings, and a measurement for each
    length of the prompt."""

    model: str
    dtype: str
    device: str
    versions: Mapping[str, object]
    repeats: int
    max_new_tokens: int
    heads: str | None
    contexts: list[Measurement]


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommands."""
    summary = "measure the speed of a model on this machine"
    parser = command(subparsers, "bench", bench, summary)
    add_options(parser, Measured)
    options.add_model_options(parser)
    summary = "write some texts, plainly and with drafts, and compare"
    parser = command(subparsers, "demo", demo, summary)
    add_options(parser, Demo)
    options.add_model_options(parser)
    parser = command(subparsers, "plan", plan, "estimate memory and time of a run", "[PROMPT]")
    add_call_options(parser)
    add_options(parser.add_argument_group("results"), Plan)
    summary = "check that every strategy writes the tokens of plain decoding"
    parser = command(subparsers, "audit", audit, summary, "[PROMPT]")
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
    text = shipped_stories()
    if args.prompt_file is not None:
        text = read_named(args.prompt_file, "--prompt-file")
    record_path = check_record(args.json)
    with options.load_model(args) as llm:
        from tokenswift.loader.identity import versions

        prompts = [beginning(llm, text, context, args.max_new_tokens) for context in args.contexts]
        heads = llm.resources.heads
        record: BenchRecord = {
            "model": llm.name,
            "dtype": llm.dtype,
            "device": llm.device,
            "versions": versions(),
            "repeats": args.repeats,
            "max_new_tokens": args.max_new_tokens,
            "heads": None if heads is None else heads.kind,
            "contexts": [
                measure(llm, prompt, args.max_new_tokens, args.repeats, SamplingParams())
                for prompt in prompts
            ],
        }
    write_results(record_path, record, rates_of(record))
    return 0


def shipped_stories() -> str:
    """The stories that come with the library, as one text."""
    files = resources.files("tokenswift").joinpath("data", "prompts").iterdir()
    in_order = sorted(files, key=lambda file: file.name)
    return "\n\n".join(file.read_text("utf-8") for file in in_order)


def beginning(llm: LLM, text: str, context: int, max_new_tokens: int) -> list[int]:
    """The first ``context`` tokens of a text.

    Raises:
        InputError: it is too short, or the model has too few positions for them and the new tokens.
    """
    prompt = llm.encode(text[: TOKEN_LETTERS * context])[:context]
    if len(prompt) < context:
        length = counted(len(prompt), "token")
        raise InputError(
            f"contexts is {context}, the text has {length}; valid: fewer, or a longer prompt_file"
        )
    llm.target.check_room(context + max_new_tokens)
    return prompt


def measure(
    llm: LLM,
    prompt: list[int],
    max_new_tokens: int,
    repeats: int,
    sampling: SamplingParams,
    warm_ups: int = 1,
    on_step: Callable[[Step], None] | None = None,
) -> Measurement:
    """Measure plain decoding and adaptive drafting after one prompt, in turns.

    Args:
        prompt: token ids.
        max_new_tokens: new tokens of each text.
        repeats: measured texts of each kind.
        warm_ups: texts of each kind before those, which do not count.
        on_step: gets the steps of plain decoding.
    """
    logger.info("measuring after %s tokens", f"{len(prompt):,}")
    states = [llm.prefill(prompt) for _ in range(warm_ups + repeats)]
    texts: dict[str, list[Generation]] = {PLAIN: [], ADAPTIVE: []}
    for _, strategy in take_turns((PLAIN, ADAPTIVE), range(warm_ups + repeats)):
        text = states[-1].generate(
            max_new_tokens,
            strategy,
            sampling=sampling,
            ignore_eos=True,
            on_step=on_step if strategy == PLAIN else None,
        )
        texts[strategy].append(text)
    plain = [text.metrics.tokens_per_second for text in texts[PLAIN][warm_ups:]]
    adaptive = [text.metrics.tokens_per_second for text in texts[ADAPTIVE][warm_ups:]]
    different_texts = {tuple(text.token_ids) for text in texts[PLAIN] + texts[ADAPTIVE]}
    return {
        "context": len(prompt),
        "prompt_tokens_per_second": [len(prompt) / state.seconds for state in states[warm_ups:]],
        "plain_tokens_per_second": plain,
        "adaptive_tokens_per_second": adaptive,
        "speedup": [fast / slow for slow, fast in zip(plain, adaptive, strict=True)],
        "tokens_a_pass": texts[ADAPTIVE][-1].metrics.mean_acceptance_length,
        "identical": len(different_texts) == 1,
    }


def rates_of(record: BenchRecord) -> str:
    """A record as a table."""
    rows = [
        (
            f"{measurement['context']:,}",
            cell(measurement["prompt_tokens_per_second"]),
            cell(measurement["plain_tokens_per_second"]),
            cell(measurement["adaptive_tokens_per_second"]),
            cell(measurement["speedup"], 2),
            "yes" if measurement["identical"] else "no",
        )
        for measurement in record["contexts"]
    ]
    head = (
        "context",
        "prompt, tokens/s",
        "plain, tokens/s",
        "adaptive, tokens/s",
        "×",
        "identical",
    )
    first_line = f"{record['model']}: {record['dtype']} on {record['device']}, "
    first_line += f"{record['heads'] or 'no'} heads; "
    first_line += f"{record['repeats']} repeats, {record['max_new_tokens']} new tokens"
    return f"{first_line}\n\n{table(head, rows, right=range(5))}"


def cell(rates: list[float], digits: int = 1) -> str:
    """Median (least–most)."""
    middle, least, most = (
        f"{rate:,.{digits}f}" for rate in (median(rates), min(rates), max(rates))
    )
    return f"{middle} ({least}–{most})"


# ---- demo ----------------------------------------------------------------------------------------


def demo(args: argparse.Namespace) -> int:
    """Continue the shipped story, and a list that repeats itself (greedy, no penalty), each twice
    with the same seed: by plain decoding, then with drafts. A chat model other than the default one
    answers a question first. Print the texts, a table, and whether every token is the same (exit
    code 1 if not)."""
    options.check_model_options(args)
    record_path = check_record(args.json)
    story = resources.files("tokenswift").joinpath("data/demo_prompt.txt").read_text("utf-8")
    logger.info("writing texts, each by plain decoding and by adaptive drafting")
    llm = options.load_model(args)
    goods = llm.encode(repeating_list(LIST_TOKENS))[:LIST_TOKENS]
    prompt_length, max_new_tokens = demo_lengths(llm, goods)
    greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
    texts = [("prose", llm.encode(story.strip()), SamplingParams()), ("list", goods, greedy)]
    if args.model != DEFAULT and llm.has_chat_template:
        chat = conversation(None, QUESTION)
        texts.insert(0, ("answer", llm.encode(chat), llm.default_sampling(chat)))
    record: dict[str, Measurement] = {}
    for name, prompt, sampling in texts:
        prompt = prompt[-prompt_length:]
        say(f"\n--- …{llm.tokenizer.decode(prompt)[-60:]}\n")
        record[name] = measure(
            llm,
            prompt,
            args.max_new_tokens or max_new_tokens,
            repeats=1,
            sampling=sampling,
            warm_ups=0,
            on_step=lambda step: say(step.text),
        )
        say("\n")
    are_identical = all(measurement["identical"] for measurement in record.values())
    last_line = f"identical: {'yes' if are_identical else 'no'}"
    write_results(record_path, record, f"{demo_table(record)}\n{last_line}")
    if not are_identical:
        reason = f" (near-ties flip in {llm.dtype}; compare in float32)"
        raise RunError(f"the two texts differ{'' if llm.dtype == 'float32' else reason}")
    return 0


def demo_table(record: dict[str, Measurement]) -> str:
    """The record of a demo as a table."""
    rows: list[tuple[str, ...]] = []
    for name, measurement in record.items():
        plain = measurement["plain_tokens_per_second"][0]
        adaptive = measurement["adaptive_tokens_per_second"][0]
        speedup = f"{measurement['speedup'][0]:.2f}"
        tokens_a_pass = f"{measurement['tokens_a_pass']:.2f}"
        rows.append(("plain", name, f"{plain:.1f}", "1.00", "1.00"))
        rows.append(("adaptive", name, f"{adaptive:.1f}", speedup, tokens_a_pass))
    head = ("strategy", "text", "tokens/s", "over plain", "tokens a pass")
    return table(head, rows, right=range(2, 5))


def repeating_list(length: int) -> str:
    """A list that repeats itself, of at least so many tokens."""
    goods = ("pears", "apples", "lamps", "ropes", "coats", "nails")
    lines = (f"{i}. {goods[i % 6]}: {10 + i % 6} boxes, shelf {i % 4}\n" for i in range(1, length))
    return "".join(lines)


def demo_lengths(llm: LLM, prompt: list[int]) -> tuple[int, int]:
    """Tokens of a prompt, and new tokens of a text, so that the model has the positions and all
    takes three minutes at most. What is tried for it warms both ways of decoding up.

    Args:
        prompt: token ids, of which a few are tried.
    """
    trial = llm.prefill(prompt[:TRIAL_PROMPT])
    for strategy in (PLAIN, ADAPTIVE):
        trial.generate(TRIAL_TOKENS, strategy, ignore_eos=True)
    rate = trial.generate(TRIAL_TOKENS, PLAIN, ignore_eos=True).metrics.tokens_per_second
    limit = llm.target.rotary.limit or LIST_TOKENS + MOST_TOKENS
    prefilled_in_time = int(PREFILL_SECONDS / trial.seconds * TRIAL_PROMPT)
    prompt_length = min(limit // 2, max(TRIAL_PROMPT, prefilled_in_time))
    written_in_time = max(TRIAL_TOKENS, int(TEXT_SECONDS * rate))
    return prompt_length, min(MOST_TOKENS, limit - prompt_length, written_in_time)
