"""An audit: tokens of every strategy against plain decoding's, logits, and the cost of int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tokenswift.audit.logits import ONE_ROW, forced_passes, int8_quality, logit_error
from tokenswift.audit.report import BASELINE, Comparison, Report
from tokenswift.checks import LARGEST
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import names_of
from tokenswift.engine.llm import LLM
from tokenswift.speculation.methods import STRATEGIES
from tokenswift.types import InputError, Step

#: What is audited where no options are given: partial caches that are smaller than the text.
SMALL: dict[str, dict[str, Any]] = {
    "tokenswift": {"budget": 64, "draft": "partial"},
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
BEFORE = 60  # characters of text shown before a difference


def variants(strategy: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by strategy, of one or "all". Without options partial caches are smaller than the
    text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    given = {name: {k: options[k] for k in options if k in names_of(name)} for name in names}
    return given if options else {name: SMALL.get(name, {}) for name in names}


def difference(
    llm: LLM, ids: list[int], plain: list[int], others: list[int], params: SamplingParams
) -> tuple[int, str | None]:
    """How many tokens after a prompt are plain decoding's, and what is next where they are not all:
    a score is plain decoding's, processed and with the noise, minus infinity where a filter took
    the token."""
    place = next(
        (i for i, pair in enumerate(zip(plain, others, strict=True)) if len({*pair}) > 1), None
    )
    if place is None:
        return len(plain), None
    text = [*ids, *plain[:place]]
    _, logits = next(forced_passes(llm, text, [0], ONE_ROW))
    scores = llm.target.sampler(params).perturbed(logits[None], text, [[]])[0]
    shown = (
        llm.tokenizer.decode if llm.tokenizer is not None else lambda ids: " ".join(map(str, ids))
    )
    own, other = (
        f"{shown([one])!r} ({one}), score {float(scores[one]):.6g}"
        for one in (plain[place], others[place])
    )
    return place, f"new token {place}: {other} instead of {own}, after …{shown(text)[-BEFORE:]!r}"


def audit(
    llm: LLM,
    variants: dict[str, dict[str, Any]],
    prompts: Sequence[str | list[int]],
    samplings: dict[str, SamplingParams],
    tokens: int = 64,
    seeds: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Audit a model.

    Args:
        variants: options by strategy; of several, one that cannot run here is skipped.
        prompts: text or token ids.
        samplings: name → parameters.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        say: gets a line of progress now and then.
    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run.
    """
    report, texts = Report(llm.name, llm.dtype, llm.device), _fitting(llm, prompts, tokens, say)
    say("int8 beside float32")
    report.quality = int8_quality(llm, texts)
    for (number, ids), (name, params), n in product(
        enumerate(texts, 1), samplings.items(), range(seeds)
    ):
        if params.greedy and n:
            continue
        params = replace(params, seed=params.seed + n)
        where = f"prompt {number} of {len(texts)}, {name}, seed {params.seed}"
        say(f"{where}: plain decoding")
        plain = llm.generate(ids, tokens, BASELINE, sampling=params, ignore_eos=True).token_ids
        if len(report.errors) < number:
            say(f"{where}: logits")
            report.errors.append(logit_error(llm, ids, plain))
        for strategy in [one for one in variants if one not in report.skipped]:
            say(f"{where}: {strategy}")
            steps: list[Step] = []
            how = (strategy, variants[strategy], params)
            try:
                got = llm.generate(ids, len(plain), *how, ignore_eos=True, on_step=steps.append)
            except InputError as refused:
                if len(variants) == 1:
                    raise
                report.skipped[strategy] = str(refused)
                continue
            found = difference(llm, ids, plain, got.token_ids, params)
            drafted = sum(step.drafted for step in steps)
            report.comparisons.append(
                Comparison(strategy, number, name, params.seed, *found, drafted)
            )
    report.leave_unused()
    return report


def _fitting(
    llm: LLM, prompts: Sequence[str | list[int]], tokens: int, say: Callable[[str], None]
) -> list[list[int]]:
    """The prompts as token ids, each cut to what leaves room for the new tokens in the model's
    positions; says whether some were."""
    limit = llm.target.rotary.limit or LARGEST
    if limit <= tokens:
        valid = f"at most {limit - 1} (the model has {limit} positions)"
        raise InputError(f"max_new_tokens is {tokens}; valid: {valid}", "max_new_tokens")
    found = [llm.encode(one) for one in prompts]
    if max(map(len, found)) > limit - tokens:
        say(
            f"prompts are cut to their first {limit - tokens} tokens (the model has {limit} "
            f"positions)"
        )
    return [ids[: limit - tokens] for ids in found]
