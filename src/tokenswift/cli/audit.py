"""``tokenswift audit``: that drafting changes no token."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from typing import Annotated

from tokenswift.cli import options
from tokenswift.cli.results import check_record, write_results
from tokenswift.config.fields import SHOWN, AtLeast, Option
from tokenswift.config.sampling import settings_of
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Audited:
    """What is compared.

    Attributes:
        prompt: a text to continue with every strategy; default: three shipped texts
        max_new_tokens: new tokens per text, at least 1
        seeds: sampled texts per prompt, at least 1, with seeds from --seed on
    """

    prompt: Annotated[str | None, Option("PROMPT", shown=True, positional=True)] = None
    max_new_tokens: Annotated[int, AtLeast(1), Option(shown=True, short="-n")] = 32
    seeds: Annotated[int, AtLeast(1), SHOWN] = 1


def audit(args: argparse.Namespace) -> int:
    """Compare strategies with plain decoding, token by token, on this model, dtype and device, and
    the logits of both with transformers' own pass in float32; show every difference with the scores
    of both tokens. The exit code is 1 where something is not exact."""
    if args.prompt is not None and not args.prompt.strip():
        raise InputError("PROMPT is empty; valid: a text of at least one word")
    sampling = options.sampling_from(args)
    replace(sampling, seed=sampling.seed + args.seeds - 1)  # the last one is a seed, too
    options.check_model_options(args)
    record_path = check_record(args.json)
    strategy_options = options.strategy_options_from(args)

    logger.info("auditing %s", args.model)
    from tokenswift.audit.run import audit as compare_strategies
    from tokenswift.audit.run import variants
    from tokenswift.audit.texts import shipped_prompts
    from tokenswift.loader.identity import versions

    llm = options.load_model(args)
    samplings = {} if sampling.greedy else {"sampling": sampling}
    samplings["greedy"] = replace(sampling, greedy=True)
    report = compare_strategies(
        llm,
        variants=variants(args.strategy, strategy_options),
        prompts=[*shipped_prompts()] if args.prompt is None else [args.prompt],
        samplings=samplings,
        tokens=args.max_new_tokens,
        seeds=args.seeds,
        say=logger.info,
    )
    record = {
        **report.record(),
        "strategy": args.strategy,
        "strategy_options": strategy_options,
        "versions": versions(),
        "tokens": args.max_new_tokens,
        "seeds": args.seeds,
        "samplings": {name: settings_of(params) for name, params in samplings.items()},
    }
    write_results(record_path, record, report.text())
    if report.failures:
        raise RunError(f"not exact: {'; '.join(report.failures)}")
    return 0
