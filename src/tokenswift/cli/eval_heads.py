"""`tokenswift eval-heads`: how well heads draft, on held-out text and on the model's own."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.progress import Stages
from tokenswift.config import OPTIONS, SamplingParams, build_options, check_integer
from tokenswift.types import InputError, Step

logger = logging.getLogger("tokenswift")
#: option, its least value, its default, what it is
NUMBERS = (
    ("positions", 16, 500, "places to look at per text sort"),
    ("context", 16, 512, "tokens of a text that is looked at"),
    ("count", 0, 4, "prompts to generate from; 0 skips it"),
    ("prompt_tokens", 16, 1500, "tokens of a prompt"),
    ("max_new_tokens", 16, 200, "new tokens per prompt"),
)
FIGURES = ("mean_acceptance_length", "acceptance_rate", "ngram_acceptance_rate", "tokens_per_second")
COLUMNS = ("top1", "top3", "match", "match3")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval-heads",
        help="measure how well heads draft",
        description="Per head: top-1 and top-3 accuracy, and the coupled match rate, "
        "on the data and on the model's own continuations; then the mean acceptance length by source.",
    )
    add = parser.add_argument
    add("--data", required=True, metavar="PATH", help="held-out text: a file, JSONL or a folder")
    for name, least, default, text in NUMBERS:
        add(
            f"--{name.replace('_', '-')}",
            type=options.integer,
            default=default,
            metavar="N",
            help=f"{text}, at least {least}; default: %(default)s",
        )
    add("--prompts", type=options.integer, dest="count", help=argparse.SUPPRESS)  # earlier names
    add("--prompt", type=options.integer, dest="prompt_tokens", help=argparse.SUPPRESS)
    add(
        "--tree",
        type=options.widths,
        default=(1, 3, 3, 3),
        metavar="W,W,…",
        help="tree of the generation; default: 1,3,3,3",
    )
    add(
        "--ngrams",
        type=options.integer,
        default=20,
        metavar="K",
        help="n-gram branches; default: %(default)s",
    )
    add(
        "--budget",
        type=options.integer,
        default=512,
        metavar="B",
        help="tokens in the partial KV cache; default: %(default)s",
    )
    options.add_model_options(parser)
    add_json_option(parser, "write the figures there")
    add("--quiet", action="store_true", help="nothing on standard error except errors")
    options.add_sampling_options(parser, "sampling (of both laws, the model's text and the noise)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    from tokenswift.train.data import check_source

    for name, least, _, _ in NUMBERS:
        check_integer(name, getattr(args, name), least)
    sampling = options.sampling_from(args)
    strategy_options = {"tree": args.tree, "ngrams": args.ngrams, "budget": args.budget}
    build_options(OPTIONS["tokenswift"], "tokenswift", strategy_options)
    options.check_model_options(args)
    check_source(args.data)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args)

    from tokenswift.heads.checkpoint import base_of
    from tokenswift.train.data import passages, prefix_of
    from tokenswift.train.evaluate import head_rates, own_text
    from tokenswift.train.selftext import Backbone

    if llm.heads is None:
        raise InputError(
            f"heads is {args.heads!r}; no heads fit {base_of(llm.model).name}; valid: a heads file"
        )
    sampling = options.model_sampling(args, sampling, llm)
    prefix = prefix_of(llm.tokenizer)

    def taken(count: int, length: int, seed: int) -> list[list[int]]:
        return passages(args.data, llm.tokenizer, [length] * count, prefix, seed)

    result: dict[str, Any] = {"heads": llm.heads.count, "kind": llm.heads.kind}
    with Stages(args.quiet) as stages:

        def rates(stage: str, texts: list[list[int]], learn: int) -> list[dict[str, float]]:
            tell = partial(stages, stage)
            return head_rates(backbone, llm.heads, texts, sampling, learn, args.positions, tell)

        given = taken(8, args.context, sampling.seed)
        backbone = Backbone(llm.model)
        logger.info("measuring on the text")
        result["text"] = rates("text", given, 32)
        logger.info("measuring on the model's own text")
        half = [passage[: len(passage) // 2] for passage in given]
        new, write = len(half[0]), partial(stages, "write")
        result["own"] = rates("own", *own_text(backbone, half, new, sampling, sampling.seed, write))
        result["acceptance"] = {}
        if args.count:
            prompts = taken(args.count, args.prompt_tokens, sampling.seed + 1)
            made = _generated(llm, prompts, args.max_new_tokens, strategy_options, sampling, stages)
            result["acceptance"] = made
    if record != STDOUT:
        print(table(result), flush=True)
    if record is not None:
        write_json(record, result)
    return 0


def _generated(
    llm: Any,
    prompts: list[list[int]],
    new: int,
    given: dict[str, Any],
    sampling: SamplingParams,
    stages: Stages,
) -> dict[str, dict[str, float]]:
    """Figures of generations, by what drafts them: the mean over the prompts."""
    found: dict[str, dict[str, float]] = {}
    drafts, done = ("partial", "hidden"), 0

    def count(step: Step) -> None:
        nonlocal done
        done += len(step.token_ids)
        stages("generate", done, len(drafts) * len(prompts) * new)

    for draft in drafts:
        stages.end()  # its line is its own
        logger.info("generating, draft from %s", draft)
        chosen = {**given, "draft": draft}
        runs = [
            llm.generate(p, new, "auto", chosen, sampling, ignore_eos=True, on_step=count).metrics
            for p in prompts
        ]
        found[draft] = {name: sum(getattr(m, name) for m in runs) / len(runs) for name in FIGURES}
    return found


def table(result: dict[str, Any]) -> str:
    """The figures as plain text."""
    lines = [f"{'text':<6} {'head':>4}  " + "  ".join(f"{c:>6}" for c in COLUMNS)]
    for source in ("text", "own"):
        for i, row in enumerate(result[source], 1):
            lines.append(f"{source:<6} {i:>4}  " + "  ".join(f"{row[c]:>6.3f}" for c in COLUMNS))
    for draft, row in result["acceptance"].items():
        lines.append(
            f"draft {draft}: mean acceptance length {row['mean_acceptance_length']:.2f}, "
            f"α {row['acceptance_rate']:.3f}, n-grams β {row['ngram_acceptance_rate']:.3f}, "
            f"{row['tokens_per_second']:.1f} tokens/s"
        )
    return "\n".join(lines)
