"""`tokenswift eval-heads`: how well heads draft, on held-out text and on the model's own."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.terminal import Stages, table
from tokenswift.config import OPTIONS, SamplingParams, build_options
from tokenswift.types import InputError, Step

logger = logging.getLogger("tokenswift")
FIGURES = ("mean_acceptance_length", "acceptance_rate", "ngram_acceptance_rate", "tokens_per_second")
COLUMNS = ("top1", "top3", "match", "match3")


@dataclass(frozen=True)
class Sizes:
    """What is evaluated.

    Attributes:
        data: held-out text: a file, JSONL or a folder
        positions: positions to evaluate per kind of text, at least 16
        context: tokens of a text that is evaluated, at least 16
        count: prompts to generate from, with the tree 1,3,3,3 and 20 n-grams, at least 0; 0 skips it
        prompt_tokens: tokens of a prompt, at least 16
        max_new_tokens: new tokens per prompt, at least 16
        budget: tokens in the partial KV cache
    """

    data: str = option(metavar="PATH")
    positions: int = option(500, least=16)
    context: int = option(512, least=16)
    count: int = option(4, earlier="--prompts", least=0)
    prompt_tokens: int = option(1500, earlier="--prompt", least=16)
    max_new_tokens: int = option(200, least=16)
    budget: int = option(512, "B")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval-heads",
        help="measure how well heads draft",
        description="Measure for each head top-1 and top-3 accuracy and the coupled match rate, on the data "
        "and on the model's own continuations; then the mean acceptance length by source.",
    )
    add_options(parser, Sizes)
    options.add_model_options(parser)
    add_json_option(parser, "write the figures to this file")
    add_options(parser, options.Quiet)
    title = "sampling (of both distributions, the model's text and the noise)"
    options.add_sampling_options(parser, title, plain=True)


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    from tokenswift.train.data import check_source, passages, prefix_of

    check_options(args, Sizes)
    sampling = options.sampling_from(args)
    tree = {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": args.budget}
    build_options(OPTIONS["tokenswift"], "tokenswift", tree)
    options.check_model_options(args)
    check_source(args.data)
    record = check_record(args.json, options.inputs_of(args))
    llm = options.load_model(args)

    from tokenswift.loader.identity import base_of
    from tokenswift.train.evaluate import head_rates, own_text
    from tokenswift.train.states import Backbone

    heads = llm.resources.heads
    if heads is None:
        name = base_of(llm.model).name
        raise InputError(f"heads is {args.heads!r}; no heads fit {name}; valid: a heads file")
    sampling = options.model_sampling(args, sampling, llm)
    prefix, backbone = prefix_of(llm.tokenizer), Backbone(llm.model)

    def taken(count: int, length: int, seed: int) -> list[list[int]]:
        return passages(args.data, llm.tokenizer, [length] * count, prefix, seed)

    given = taken(8, args.context, sampling.seed)
    half = [passage[: len(passage) // 2] for passage in given]
    result: dict[str, Any] = {"heads": heads.count, "kind": heads.kind}
    with Stages(args.quiet) as stages:
        logger.info("measuring on the text")
        rates = partial(head_rates, backbone, heads, sampling=sampling, positions=args.positions)
        result["text"] = rates(given, learn=32, tell=partial(stages, "text"))
        logger.info("measuring on the model's own text")
        own = own_text(backbone, half, len(half[0]), sampling, partial(stages, "write"))
        result["own"] = rates(own, learn=len(half[0]), tell=partial(stages, "own"))
        prompts = taken(args.count, args.prompt_tokens, sampling.seed + 1)
        result["acceptance"] = _generated(llm, prompts, args.max_new_tokens, tree, sampling, stages)
    if record != STDOUT:
        print(shown(result), flush=True)
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
    """Figures of generations, by what drafts them: the mean over the prompts; none without prompts."""
    found: dict[str, dict[str, float]] = {}
    drafts, done = ("partial", "hidden") if prompts else (), 0

    def count(step: Step) -> None:
        nonlocal done
        done += len(step.token_ids)
        stages("generate", done, len(drafts) * len(prompts) * new)

    for draft in drafts:
        stages.end()  # its line is its own
        logger.info("generating, draft from %s", draft)
        chosen = {**given, "draft": draft}
        runs = [
            llm.generate(p, new, "tokenswift", chosen, sampling, ignore_eos=True, on_step=count).metrics
            for p in prompts
        ]
        found[draft] = {name: sum(getattr(m, name) for m in runs) / len(runs) for name in FIGURES}
    return found


def shown(result: dict[str, Any]) -> str:
    """The figures as text."""
    rates = [
        (source, str(i), *(f"{row[column]:.3f}" for column in COLUMNS))
        for source in ("text", "own")
        for i, row in enumerate(result[source], 1)
    ]
    lines = [table(rates, ("text", "head", *COLUMNS), right=range(1, 6))]
    for draft, row in result["acceptance"].items():
        lines.append(
            f"draft {draft}: mean acceptance length {row['mean_acceptance_length']:.2f}, "
            f"α {row['acceptance_rate']:.3f}, n-grams β {row['ngram_acceptance_rate']:.3f}, "
            f"{row['tokens_per_second']:.1f} tokens/s"
        )
    return "\n".join(lines)
