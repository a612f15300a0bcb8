"""The audit itself: token equality and near-ties on the user's model, distributions on a toy one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import torch

from tokenswift.audit import toy
from tokenswift.audit.distribution import chi_square
from tokenswift.audit.equality import Plain, account, first_difference, plain_text
from tokenswift.audit.passes import NumericError, numeric_error
from tokenswift.audit.report import Comparison, DistributionTest, Report
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.spec.methods.table import STRATEGIES
from tokenswift.types import InputError, Step
from tokenswift.words import counted

BASELINE = toy.BASELINE
SEPARATOR = "---"
#: The paper's tree over a partial cache that is smaller than the text; audited besides the defaults.
PAPER: dict[str, Any] = {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 64, "sinks": 16, "draft": "partial"}
#: What self-speculation is audited with: a partial cache that is smaller than the text.
SMALL: dict[str, dict[str, Any]] = {
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
#: Plain decoding's runs on the toy model for each run of a strategy, whose runs must equal them.
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
class AuditOptions:
    """What an audit runs.

    Attributes:
        prompts: text or token ids.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        samplings: name → parameters.
        toy_runs: runs of plain decoding per case on the toy model (strategies: a fifth, at least 100);
            0 leaves the toy model out.
        tolerate: skip a strategy that cannot run here, instead of raising.
    """

    variants: list[Variant]
    prompts: list[str | list[int]]
    samplings: dict[str, SamplingParams]
    tokens: int = 64
    seeds: int = 1
    toy_runs: int = 500
    tolerate: bool = False


def audit(llm: LLM, options: AuditOptions, say: Callable[[str], None] = lambda line: None) -> Report:
    """Make the audit; ``say`` gets a line of progress now and then.

    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run.
    """
    started = time.monotonic()
    work = _Audit(llm, options, say, Report(llm.name, llm.dtype, llm.device))
    work.compare()
    work.leave_unused()
    if options.toy_runs:
        work.test_distributions()
    work.report.seconds = time.monotonic() - started
    return work.report


@dataclass(frozen=True, slots=True)
class _Audit:
    """An audit under way."""

    llm: LLM
    options: AuditOptions
    say: Callable[[str], None]
    report: Report

    def fitting(self) -> list[list[int]]:
        """The prompts as token ids, each cut to what leaves room for the new tokens in the model's
        positions; says which were.

        Raises:
            InputError: a prompt that is none, or as many new tokens as positions.
        """
        limit, new = self.llm.target.rotary.limit, self.options.tokens
        if limit is not None and new >= limit:
            raise InputError(
                f"max_new_tokens is {new}; valid: at most {limit - 1} (the model has {limit} positions)",
                "max_new_tokens",
            )
        found = []
        for number, prompt in enumerate(self.options.prompts, 1):
            ids = self.llm.encode(prompt)
            if limit is not None and len(ids) + new > limit:
                self.say(
                    f"prompt {number} of {len(self.options.prompts)} has {counted(len(ids), 'token')}, "
                    f"shortened to its first {counted(limit - new, 'token')}: the model has {limit:,} "
                    f"positions, and {counted(new, 'token is', 'tokens are')} written"
                )
                ids = ids[: limit - new]
                self.report.shortened[number] = len(ids)
            found.append(ids)
        return found

    def compare(self) -> None:
        """Every prompt with every sampling, seed and variant against plain decoding."""
        options = self.options
        for number, ids in enumerate(self.fitting(), 1):
            error: NumericError | None = None
            for name, params in options.samplings.items():
                for seed in range(params.seed, params.seed + (1 if params.greedy else options.seeds)):
                    where = f"prompt {number} of {len(options.prompts)}, {name}, seed {seed}"
                    self.say(f"{where}: plain decoding")
                    plain = plain_text(self.llm, ids, options.tokens, replace(params, seed=seed))
                    if error is None:
                        self.say(f"{where}: numeric error")
                        error = numeric_error(self.llm, ids, plain.tokens, plain.kept)
                        self.report.errors.append(error)
                    for variant in options.variants:
                        if variant.label not in self.report.skipped:
                            self._one(
                                f"{where}: {variant.label}", variant, plain, (number, name, seed), error
                            )

    def _one(
        self, where: str, variant: Variant, plain: Plain, key: tuple[int, str, int], error: NumericError
    ) -> None:
        """One text by a variant; ``key``: number of the prompt, name of the sampling, seed."""
        llm, new = self.llm, self.options.tokens
        start = time.monotonic()
        drafted = 0

        def count(step: Step) -> None:
            nonlocal drafted
            drafted += step.drafted

        try:
            got = llm.generate(
                plain.prompt,
                new,
                variant.strategy,
                variant.options,
                plain.params,
                ignore_eos=True,
                on_step=count,
            )
        except InputError as refused:
            if not self.options.tolerate:
                raise
            self.report.skipped[variant.label] = str(refused)
            self.say(f"{where}: not run ({refused})")
            return
        seconds = time.monotonic() - start
        place = first_difference(plain.tokens, got.token_ids)
        if place is None:
            self.say(f"{where}: {counted(new, 'token')} equal, {seconds:.1f} s")
        else:
            self.say(f"{where}: differs at new token {place}, looking into it")
        found = account(llm, plain, variant.strategy, variant.options, got.token_ids, error)
        self.report.comparisons.append(
            Comparison(
                variant.label,
                *key,
                tokens=new if place is None else place,
                length=got.metrics.mean_acceptance_length,
                seconds=seconds,
                divergence=found,
                drafted=drafted,
                draft_source=got.draft_source,
                heads=got.heads,
            )
        )

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say nothing of it:
        it counts as not run."""
        for variant in self.options.variants:
            rows = [c for c in self.report.comparisons if c.strategy == variant.label]
            if variant.strategy != BASELINE and rows and not any(c.drafted for c in rows):
                self.report.skipped[variant.label] = (
                    f"it drafted nothing on these texts; it may draft from: {rows[0].draft_source}"
                )

    def test_distributions(self) -> None:
        """Whole runs on toy models against their enumerated distributions."""
        model, report, most = self.llm.model, self.report, self.options.toy_runs
        self.say("toy model: numeric error after a long prompt")
        for dtype in dict.fromkeys((torch.float32, self.llm.target.dtype)):
            report.toy_errors[str(dtype).removeprefix("torch.")] = toy.toy_error(model, dtype)
        self.say("toy model: enumerating distributions")
        small = toy.toy_llm(model)
        medusa = toy.toy_llm(model, "medusa")
        cases = {case: (params, toy.PROMPT) for case, params in toy.CASES.items()}
        own = next((p for p in self.options.samplings.values() if not p.greedy), None)
        if own is not None:
            cases["yours"] = own, toy.PROMPT
        cases["all, long prompt"] = toy.CASES["all"], toy.LONG_PROMPT
        ran = [v for v in self.options.variants if v.label not in report.skipped]
        for number, (case, (params, prompt)) in enumerate(cases.items()):
            first = number * most  # seeds of its own for every case: the tests are independent
            expected = toy.toy_distribution(small.model, params, prompt)
            if len(expected) < 2:
                continue  # the filters leave one text: token equality says it all
            plain = list(toy.outcomes(small, BASELINE, params, most, first=first, prompt=prompt))
            for strategy in [BASELINE, *dict.fromkeys(v.strategy for v in ran)]:
                runs = most if strategy == BASELINE else max(100, most // DRAFTED)
                self.say(f"toy model, {case}: {runs} runs of {strategy}")
                seen, same = plain, None
                if strategy != BASELINE:
                    drafting = medusa if strategy == "medusa" else small
                    seen = list(toy.outcomes(drafting, strategy, params, runs, first=first, prompt=prompt))
                    same = sum(a == b for a, b in zip(plain, seen, strict=False))
                fit = chi_square(seen, expected)
                test = DistributionTest(strategy, case, fit.p, fit.samples, fit.variation, same)
                report.distributions.append(test)
        for case in PUBLISHED_CASES:
            self.say(f"toy model, {case}: the published rule")
            params = toy.CASES[case]
            seen = list(toy.outcomes(small, "tokenswift", params, max(100, most // 3), (toy.PUBLISHED,)))
            fit = chi_square(seen, toy.toy_distribution(small.model, params))
            report.published.append(
                DistributionTest("published rule", case, fit.p, fit.samples, fit.variation)
            )
