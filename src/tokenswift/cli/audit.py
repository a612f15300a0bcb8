"""``tokenswift audit``: is the output exact on this model, dtype and device?"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields, replace
from typing import Any

from tokenswift.checks import check_choice, check_integer
from tokenswift.cli import options
from tokenswift.cli.declare import SHORT, integer
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.config import OPTIONS, build_options, settings_of
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")

TOKENS, QUICK = 32, 8  # new tokens per text: usually, with --quick


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "audit",
        help="check that every strategy writes the tokens of plain decoding",
        description="Compare strategies with plain decoding, token by token, on this model, dtype and "
        "device, and the logits of both with transformers' own pass in float32; show every difference with "
        "the scores of both tokens. With --distribution, compare the frequencies of what is written with the "
        "model's probabilities, too. Tables and verdict go to standard output, progress to standard error.",
        epilog="Exit codes: 0 exact, 1 not exact or the run failed, 2 bad input, 130 interrupted.",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="a text to continue with every strategy; default: those of --prompts",
    )
    for name, default, text in (
        ("max-new-tokens", None, f"new tokens per text, at least 1; default: {TOKENS}"),
        ("seeds", 1, "sampled texts per prompt, at least 1, with seeds from --seed on"),
        (
            "distribution",
            0,
            "runs of plain decoding that test the distribution (strategies: a fifth, but at least 100), "
            "from 100 to 10000; 0: no test",
        ),
    ):
        short = [SHORT[key]] if (key := name.replace("-", "_")) in SHORT else []
        parser.add_argument(
            *short,
            f"--{name}",
            type=integer,
            default=default,
            metavar="N",
            help=text if default is None else f"{text}; default: %(default)s",
        )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"the first prompt alone, and {QUICK} new tokens per text where --max-new-tokens is not given: "
        "to check an installation",
    )
    parser.add_argument("--tokens", type=integer, dest="max_new_tokens", help=argparse.SUPPRESS)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="UTF-8 file of prompts with lines of --- between them; default: three shipped texts",
    )
    options.add_model_options(parser, dtype="float32")
    options.add_strategy_options(parser)
    options.add_sampling_options(parser, "sampling (defaults: the paper's)", plain=True)
    parser.set_defaults(strategy="all")
    for action in parser._actions:
        if action.dest == "strategy":
            action.help = "a strategy by name, or all; default: %(default)s"
    group = parser.add_argument_group("results")
    add_json_option(group, "write all findings to this file")
    group.add_argument("--quiet", action="store_true", help="nothing on standard error except errors")


def run(args: argparse.Namespace) -> int:
    """Audit; cheap checks come before the model is loaded."""
    if args.max_new_tokens is None:
        args.max_new_tokens = QUICK if args.quick else TOKENS
    check_integer("max_new_tokens", args.max_new_tokens, 1)
    check_integer("seeds", args.seeds, 1)
    if args.distribution and not 100 <= args.distribution <= 10_000:
        raise InputError(f"distribution is {args.distribution}; valid: from 100 to 10000, or 0")
    sampling = options.sampling_from(args)
    if sampling.seed + args.seeds > 2**63:
        raise InputError(f"seeds is {args.seeds}; valid: up to 2^63 - 1 together with --seed")
    options.check_model_options(args)
    record = check_record(args.json, options.inputs_of(args))
    given = _strategy_options(args)

    if args.prompt is not None and args.prompts is not None:
        raise InputError("PROMPT and --prompts given; valid: one of them")
    if args.prompt is not None and not args.prompt.strip():
        raise InputError(f"PROMPT is {args.prompt!r}; valid: a text of at least one word")
    text = None if args.prompts is None else options.read_named(args.prompts, "--prompts")
    if text is not None and not text.replace("---", "").strip():
        raise InputError(f"prompts {args.prompts} holds no text; valid: a UTF-8 file with prompts")

    logger.info("auditing %s", args.model)
    from tokenswift.audit.compare import AuditOptions, audit, shipped_prompts, split_prompts, variants

    if args.prompt is not None:
        prompts = [args.prompt]
    else:
        prompts = shipped_prompts() if text is None else split_prompts(text)
    if args.quick:
        del prompts[1:]
    llm = options.load_model(args)
    logger.info("%s, %s on %s", llm.name, llm.dtype, llm.device)
    sampling = options.model_sampling(args, sampling, llm)
    samplings = {"greedy": replace(sampling, greedy=True)}
    if not sampling.greedy:
        samplings = {"sampling": sampling, **samplings}
    audited = AuditOptions(
        variants=variants(args.strategy, given),
        prompts=list(prompts),
        samplings=samplings,
        tokens=args.max_new_tokens,
        seeds=args.seeds,
        runs=args.distribution,
        tolerate=args.strategy == "all",
    )
    report = audit(llm, audited, logger.info)
    if record != STDOUT:
        print(report.text(), flush=True)
    if record is not None:
        write_json(record, _record(args, report.record(), samplings, given))
    sys.stdout.flush()
    logger.info("%.0f s", report.seconds)
    if report.failures:
        raise RunError(f"not exact: {'; '.join(report.failures)}")
    return 0


def _strategy_options(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options given; with ``all`` each must belong to some strategy, which gets it."""
    if args.strategy != "all":
        check_choice("strategy", args.strategy, ("all", *OPTIONS))
        return options.strategy_options_from(args)
    given = {name: getattr(args, name) for name in options.STRATEGY if getattr(args, name) is not None}
    for strategy, kind in OPTIONS.items():
        known = {field.name for field in fields(kind)}
        build_options(kind, strategy, {name: value for name, value in given.items() if name in known})
    return given


def _record(
    args: argparse.Namespace, found: dict[str, Any], samplings: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    import torch

    from tokenswift.loader.identity import versions

    return {
        **found,
        "strategy": args.strategy,
        "strategy_options": given,
        "samplings": {name: settings_of(params) for name, params in samplings.items()},
        "tokens": args.max_new_tokens,
        "seeds": args.seeds,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
