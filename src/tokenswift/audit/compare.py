"""The audit itself: tokens and logits on the user's model, and the distribution where asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any

from tokenswift.audit.distribution import (
    CONTEXT,
    FEWEST,
    chi_square,
    likely_pairs,
    outcome,
    pairs_written,
    testable,
)
from tokenswift.audit.logits import LogitError, last_logits, logit_error
from tokenswift.audit.verdict import Comparison, Difference, DistributionTest, Report
from tokenswift.config import OPTIONS, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.spec.methods.table import STRATEGIES
from tokenswift.types import InputError, Step
from tokenswift.words import counted

BASELINE = "autoregressive"
SEPARATOR = "---"
#: What is audited where no options are given: partial caches that are smaller than the text.
SMALL: dict[str, dict[str, Any]] = {
    "tokenswift": {"budget": 64, "draft": "partial"},
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
#: Plain decoding's runs for each run of a strategy, whose runs must equal them.
DRAFTED = 5
BEFORE = 60  # characters of text shown before a difference


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with options, under the name that tables show."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)


def variants(strategy: str, options: dict[str, Any]) -> list[Variant]:
    """What to audit: one strategy or "all". Without options partial caches are smaller than the text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    return [Variant(name, name, _options_of(name, options)) for name in names]


def _options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(OPTIONS[name])}
    own = {key: value for key, value in options.items() if key in known}
    return own if options else SMALL.get(name, {})


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


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; None for equal sequences."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def difference(
    llm: LLM, text: list[int], place: int, tokens: tuple[int, int], params: SamplingParams, error: float
) -> Difference:
    """A difference from plain decoding behind a text: of its token at ``place`` and a strategy's."""
    sampler, row = llm.target.sampler(params), last_logits(llm, text)
    scores = sampler.perturbed(row[None], text, [[]])[0]
    moved = row.clone()
    moved[tokens[0]] -= 2 * error
    moved[tokens[1]] += 2 * error
    flips = 0 < error < float("inf") and sampler.choose(moved[None], text, [[]]) == [tokens[1]]
    shown = llm.tokenizer.decode if llm.tokenizer is not None else lambda ids: " ".join(map(str, ids))
    plain, other = ((token, shown([token])) for token in tokens)
    both = float(scores[tokens[0]]), float(scores[tokens[1]])
    return Difference(place, shown(text)[-BEFORE:], plain, other, both, flips)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What an audit runs.

    Attributes:
        prompts: text or token ids.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        samplings: name → parameters.
        runs: runs of plain decoding that test the distribution (strategies: a fifth, at least 100); 0: it
            is not tested.
        tolerate: skip a strategy that cannot run here, instead of raising.
    """

    variants: list[Variant]
    prompts: list[str | list[int]]
    samplings: dict[str, SamplingParams]
    tokens: int = 64
    seeds: int = 1
    runs: int = 0
    tolerate: bool = False


def audit(llm: LLM, options: AuditOptions, say: Callable[[str], None] = lambda line: None) -> Report:
    """Make the audit; ``say`` gets a line of progress now and then.

    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run; a distribution
            to test, and greedy decoding alone.
    """
    if options.runs and all(params.greedy for params in options.samplings.values()):
        raise InputError(f"distribution is {options.runs}; valid: 0 with greedy decoding", "distribution")
    started = time.monotonic()
    work = _Audit(llm, options, say, Report(llm.name, llm.dtype, llm.device))
    prompts = work.fitting()
    work.compare(prompts)
    work.leave_unused()
    if options.runs:
        work.test_distribution(prompts)
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

    def compare(self, prompts: list[list[int]]) -> None:
        """Every prompt with every sampling, seed and variant against plain decoding."""
        options = self.options
        for number, ids in enumerate(prompts, 1):
            error: LogitError | None = None
            for name, params in options.samplings.items():
                for seed in range(params.seed, params.seed + (1 if params.greedy else options.seeds)):
                    where = f"prompt {number} of {len(options.prompts)}, {name}, seed {seed}"
                    self.say(f"{where}: plain decoding")
                    given = replace(params, seed=seed)
                    plain = self.llm.generate(
                        ids, options.tokens, BASELINE, sampling=given, ignore_eos=True
                    ).token_ids
                    if error is None:
                        self.say(f"{where}: logits")
                        error = logit_error(self.llm, ids, plain)
                        self.report.errors.append(error)
                    for variant in options.variants:
                        if variant.label not in self.report.skipped:
                            found = self._one(f"{where}: {variant.label}", variant, ids, plain, given, error)
                            if found is not None:
                                self.report.comparisons.append(
                                    Comparison(variant.label, number, name, seed, **found)
                                )

    def _one(
        self,
        where: str,
        variant: Variant,
        ids: list[int],
        plain: list[int],
        params: SamplingParams,
        error: LogitError,
    ) -> dict[str, Any] | None:
        """What was found of a text by a variant; None: it cannot run."""
        start = time.monotonic()
        drafted = 0

        def count(step: Step) -> None:
            nonlocal drafted
            drafted += step.drafted

        try:
            got = self.llm.generate(
                ids, len(plain), variant.strategy, variant.options, params, ignore_eos=True, on_step=count
            )
        except InputError as refused:
            if not self.options.tolerate:
                raise
            self.report.skipped[variant.label] = str(refused)
            self.say(f"{where}: not run ({refused})")
            return None
        seconds = time.monotonic() - start
        place, found = first_difference(plain, got.token_ids), None
        if place is None:
            self.say(f"{where}: {counted(len(plain), 'token')} equal, {seconds:.1f} s")
        else:
            self.say(f"{where}: differs at new token {place}")
            both = plain[place], got.token_ids[place]
            found = difference(self.llm, [*ids, *plain[:place]], place, both, params, error.error)
        return {
            "tokens": len(plain) if place is None else place,
            "length": got.metrics.mean_acceptance_length,
            "seconds": seconds,
            "divergence": found,
            "drafted": drafted,
            "draft_source": got.draft_source,
            "heads": got.heads,
        }

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say nothing of it:
        it counts as not run."""
        for variant in self.options.variants:
            rows = [c for c in self.report.comparisons if c.strategy == variant.label]
            if variant.strategy != BASELINE and rows and not any(c.drafted for c in rows):
                self.report.skipped[variant.label] = (
                    f"it drafted nothing on these texts; it may draft from: {rows[0].draft_source}"
                )

    def test_distribution(self, prompts: list[list[int]]) -> None:
        """Whole runs, two tokens each, against the model's probabilities: behind the first
        prompt that leaves a choice, with every sampling."""
        llm, report, most = self.llm, self.report, self.options.runs
        ran = [Variant(BASELINE, BASELINE), *(v for v in self.options.variants if v.strategy != BASELINE)]
        for name, params in self.options.samplings.items():
            if params.greedy:
                continue
            ends = (ids[-CONTEXT:] for ids in prompts)
            prompt = next((ids for ids in ends if testable(likely_pairs(llm, ids, params, FEWEST))), None)
            if prompt is None:
                why = f"no prompt whose next two tokens {FEWEST} runs can tell apart"
                report.skipped[f"distribution, {name}"] = why
                continue
            plain: list[tuple[int, ...]] = []
            for variant in ran:
                if variant.label in report.skipped:
                    continue
                runs = most if variant.strategy == BASELINE else max(FEWEST, most // DRAFTED)
                self.say(f"distribution, {name}: {runs} runs of {variant.label}")
                law = likely_pairs(llm, prompt, params, runs)
                seen = list(pairs_written(llm, prompt, variant.strategy, variant.options, params, runs))
                plain = plain or seen
                same = sum(a == b for a, b in zip(plain, seen, strict=False))
                fit = chi_square((outcome(pair, law) for pair in seen), law)
                report.distributions.append(
                    DistributionTest(variant.label, name, fit.p, fit.samples, fit.variation, same)
                )
