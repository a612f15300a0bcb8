"""The audit itself: token equality and near-ties on the user's model, laws on a toy of its family."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import torch

from tokenswift.audit import toy
from tokenswift.audit.equality import Plain, account, first_difference, plain_text
from tokenswift.audit.law import chi_square
from tokenswift.audit.passes import NumericError, numeric_error
from tokenswift.audit.report import Comparison, LawTest, Report
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM, STRATEGIES
from tokenswift.types import InputError, Step

BASELINE = toy.BASELINE
SEPARATOR = "---"
#: The paper's tree over a partial cache that is smaller than the text; audited besides the defaults.
PAPER: dict[str, Any] = {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 64, "sinks": 16, "draft": "partial"}
#: What self-speculation is audited with: a partial cache that is smaller than the text.
SMALL: dict[str, dict[str, Any]] = {
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
#: Plain decoding's law is tested with this many times the runs of a strategy, whose runs must equal it.
DRAFTED = 5
PUBLISHED_CASES = ("no processor", "min-p", "all")


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with options, under the name that tables show."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)


def variants(strategy: str, options: dict[str, Any]) -> list[Variant]:
    """What to audit: one strategy or "all". TokenSwift has the paper's tree where none is given, and without
    options partial caches are smaller than the text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    return [Variant(name, name, _options_of(name, options)) for name in names]


def _options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    given = toy.options_of(name, options) if options else SMALL.get(name, {})
    return {**PAPER, **given} if name == "tokenswift" and not given.get("tree") else given


def split_prompts(text: str) -> list[str]:
    """The prompts of a file: texts with lines of ``---`` between them."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(line)
    return [prompt for prompt in ("\n".join(part).strip() for part in parts) if prompt]


def shipped_prompts() -> list[str]:
    """A story, a list of instructions, and a piece of program."""
    data = resources.files("tokenswift").joinpath("data")
    files = ("demo_prompt.txt", "audit_prompts.txt")
    return [p for name in files for p in split_prompts(data.joinpath(name).read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit runs.

    Attributes:
        prompts: text or token ids.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        samplings: name → parameters.
        law_samples: runs of plain decoding per case on the toy model (strategies: a fifth, at least 100);
            0 leaves the laws out.
        tolerate: skip a strategy that cannot run here, instead of raising.
    """

    variants: list[Variant]
    prompts: list[str | list[int]]
    samplings: dict[str, SamplingParams]
    tokens: int = 64
    seeds: int = 1
    law_samples: int = 500
    tolerate: bool = False


def audit(llm: LLM, plan: Plan, say: Callable[[str], None] = lambda line: None) -> Report:
    """Run the plan; ``say`` gets a line of progress now and then.

    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run.
    """
    started = time.monotonic()
    report = Report(llm.name, llm.dtype, llm.device)
    prompts = fitting(llm, plan, report, say)
    _compare(llm, plan, prompts, report, say)
    _leave_unused(plan, report)
    if plan.law_samples:
        _laws(llm, plan, report, say)
    report.seconds = time.monotonic() - started
    return report


def fitting(llm: LLM, plan: Plan, report: Report, say: Callable[[str], None]) -> list[list[int]]:
    """The prompts as token ids, each cut to what leaves room for the plan's new tokens in the model's
    positions; says which were.

    Raises:
        InputError: a prompt that is none, or as many new tokens as positions.
    """
    limit = llm.target.rotary.limit
    if limit is not None and plan.tokens >= limit:
        raise InputError(
            f"max_new_tokens is {plan.tokens}; valid: at most {limit - 1} (the model has {limit} positions)",
            "max_new_tokens",
        )
    found = []
    for number, prompt in enumerate(plan.prompts, 1):
        ids = llm.encode(prompt)
        if limit is not None and len(ids) + plan.tokens > limit:
            say(
                f"prompt {number} of {len(plan.prompts)} has {len(ids)} tokens, shortened to its first "
                f"{limit - plan.tokens} tokens: the model has {limit} positions, and {plan.tokens} tokens "
                f"are written"
            )
            ids = ids[: limit - plan.tokens]
            report.shortened[number] = len(ids)
        found.append(ids)
    return found


def _compare(
    llm: LLM, plan: Plan, prompts: list[list[int]], report: Report, say: Callable[[str], None]
) -> None:
    for number, ids in enumerate(prompts, 1):
        error: NumericError | None = None
        for name, params in plan.samplings.items():
            for seed in range(params.seed, params.seed + (1 if params.greedy else plan.seeds)):
                where = f"prompt {number} of {len(plan.prompts)}, {name}, seed {seed}"
                say(f"{where}: plain decoding")
                plain = plain_text(llm, ids, plan.tokens, replace(params, seed=seed))
                if error is None:
                    say(f"{where}: numeric error")
                    error = numeric_error(llm, ids, plain.tokens, plain.kept)
                    report.errors.append(error)
                for variant in plan.variants:
                    if variant.label not in report.skipped:
                        _one(llm, plan, report, say, variant, plain, (number, name, seed), error)


def _leave_unused(plan: Plan, report: Report) -> None:
    """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say nothing of it: it
    counts as not run."""
    for variant in plan.variants:
        rows = [c for c in report.comparisons if c.strategy == variant.label]
        if variant.strategy != BASELINE and rows and not any(c.drafted for c in rows):
            report.skipped[variant.label] = (
                f"it drafted nothing on these texts; it may draft from: {rows[0].draft_source}"
            )


def _one(
    llm: LLM,
    plan: Plan,
    report: Report,
    say: Callable[[str], None],
    variant: Variant,
    plain: Plain,
    key: tuple[int, str, int],
    error: NumericError,
) -> None:
    where = f"prompt {key[0]} of {len(plan.prompts)}, {key[1]}, seed {key[2]}: {variant.label}"
    start = time.monotonic()
    drafted = 0

    def count(step: Step) -> None:
        nonlocal drafted
        drafted += step.drafted

    try:
        got = llm.generate(
            plain.prompt,
            plan.tokens,
            variant.strategy,
            variant.options,
            plain.params,
            ignore_eos=True,
            on_step=count,
        )
    except InputError as refused:
        if not plan.tolerate:
            raise
        report.skipped[variant.label] = str(refused)
        say(f"{where}: not run ({refused})")
        return
    seconds = time.monotonic() - start
    place = first_difference(plain.tokens, got.token_ids)
    if place is None:
        say(f"{where}: {plan.tokens} tokens equal, {seconds:.1f} s")
    else:
        say(f"{where}: differs at new token {place}, looking into it")
    found = account(llm, plain, variant.strategy, variant.options, got.token_ids, error)
    report.comparisons.append(
        Comparison(
            variant.label,
            *key,
            tokens=plan.tokens if place is None else place,
            length=got.metrics.mean_acceptance_length,
            seconds=seconds,
            divergence=found,
            drafted=drafted,
            draft_source=got.draft_source,
            heads=got.heads,
        )
    )


def _laws(llm: LLM, plan: Plan, report: Report, say: Callable[[str], None]) -> None:
    say("toy model: numeric error after a long prompt")
    for dtype in dict.fromkeys((torch.float32, llm.target.dtype)):
        report.toy_errors[str(dtype).removeprefix("torch.")] = toy.toy_error(llm.model, dtype)
    say("toy model: enumerating laws")
    small = toy.toy_llm(llm.model)
    medusa = toy.toy_llm(llm.model, "medusa")
    cases = {case: (params, toy.PROMPT) for case, params in toy.CASES.items()}
    own = next((p for p in plan.samplings.values() if not p.greedy), None)
    if own is not None:
        cases["yours"] = own, toy.PROMPT
    cases["all, long prompt"] = toy.CASES["all"], toy.LONG_PROMPT
    strategies = list(dict.fromkeys(v.strategy for v in plan.variants if v.label not in report.skipped))
    for number, (case, (params, prompt)) in enumerate(cases.items()):
        first = number * plan.law_samples  # seeds of its own for every case: the tests are independent
        law = toy.toy_law(small.model, params, prompt)
        if len(law) < 2:
            continue  # the filters leave one text: token equality says it all
        plain = list(toy.outcomes(small, BASELINE, params, plan.law_samples, first=first, prompt=prompt))
        for strategy in [BASELINE, *strategies]:
            runs = plan.law_samples if strategy == BASELINE else max(100, plan.law_samples // DRAFTED)
            say(f"toy model, {case}: {runs} runs of {strategy}")
            seen, same = plain, None
            if strategy != BASELINE:
                drafting = medusa if strategy == "medusa" else small
                seen = list(toy.outcomes(drafting, strategy, params, runs, first=first, prompt=prompt))
                same = sum(a == b for a, b in zip(plain, seen, strict=False))
            fit = chi_square(seen, law)
            report.laws.append(LawTest(strategy, case, fit.p, fit.samples, fit.variation, same))
    for case in PUBLISHED_CASES:
        say(f"toy model, {case}: the published rule")
        runs = max(100, plan.law_samples // 3)
        params = toy.CASES[case]
        seen = list(toy.outcomes(small, "tokenswift", params, runs, (toy.PUBLISHED,)))
        fit = chi_square(seen, toy.toy_law(small.model, params))
        report.published.append(LawTest("published rule", case, fit.p, fit.samples, fit.variation))
