"""``tokenswift audit``: is the output exact on this model, dtype and device?"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.output import check_record, give
from tokenswift.config import OPTIONS, build_options, names_of, settings_of
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Audited:
    """What is compared.

    Attributes:
        prompt: a text to continue with every strategy; default: those of --prompts
        max_new_tokens: new tokens per text, at least 1
        seeds: sampled texts per prompt, at least 1, with seeds from --seed on
        prompts: UTF-8 file of prompts with lines of --- between them; default: three shipped texts
    """

    prompt: str | None = option(None, "PROMPT", place=True, nargs="?")
    max_new_tokens: int = option(32, least=1)
    seeds: int = option(1, least=1)
    prompts: str | None = option(None, "FILE")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    words = "check that every strategy writes the tokens of plain decoding"
    parser = command(subparsers, "audit", run, words, "[PROMPT]")
    add_options(parser, Audited)
    options.add_model_options(parser, dtype="float32")
    options.add_strategy_options(parser, "all")
    options.add_sampling_options(parser, "sampling (defaults: the paper's)", plain=True)
    add_options(parser.add_argument_group("results"), options.Record)


def run(args: argparse.Namespace) -> int:
    """Compare strategies with plain decoding, token by token, on this model, dtype and device, and the logits
    of both with transformers' own pass in float32; show every difference with the scores of both tokens. The
    exit code is 1 where something is not exact."""
    if args.prompt is not None and args.prompts is not None:
        raise InputError("PROMPT and --prompts given; valid: one of them")
    sampling = options.sampling_from(args)
    replace(sampling, seed=sampling.seed + args.seeds - 1)  # the last one is a seed, too
    options.check_model_options(args)
    record = check_record(args.json)
    given, text = _strategy_options(args), args.prompt
    if args.prompts is not None:
        text = options.read_named(args.prompts, "--prompts")

    logger.info("auditing %s", args.model)
    from tokenswift.audit import Audit, shipped_prompts, split_prompts, variants
    from tokenswift.loader.identity import versions

    prompts = shipped_prompts() if text is None else split_prompts(text)
    if not prompts:
        raise InputError("there is no prompt; valid: at least one word")
    llm = options.load_model(args)
    samplings = {} if sampling.greedy else {"sampling": sampling}
    audited = Audit(
        llm,
        variants=variants(args.strategy, given),
        prompts=[*prompts],
        samplings={**samplings, "greedy": replace(sampling, greedy=True)},
        tokens=args.max_new_tokens,
        seeds=args.seeds,
        say=logger.info,
    )
    report = audited.run()
    made = {"strategy": args.strategy, "strategy_options": given, "versions": versions()}
    made |= {"tokens": audited.tokens, "seeds": args.seeds}
    made["samplings"] = {name: settings_of(params) for name, params in audited.samplings.items()}
    give(record, {**report.record(), **made}, report.text())
    if report.failures:
        raise RunError(f"not exact: {'; '.join(report.failures)}")
    return 0


def _strategy_options(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options given; with ``all`` each must suit the strategies that have it, which get it."""
    if args.strategy != "all":
        check_choice("strategy", args.strategy, ("all", *OPTIONS))
        return options.strategy_options_from(args)
    given = options.given_strategy_options(args)
    for strategy, kind in OPTIONS.items():
        build_options(kind, strategy, {key: given[key] for key in given if key in names_of(strategy)})
    return given
