"""The audit: tokens and logits on the user's model, the distribution where asked, and what was found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from typing import Any

from tokenswift.audit.logits import (
    CONTEXT,
    FEWEST,
    LogitError,
    chi_square,
    last_logits,
    likely_pairs,
    logit_error,
    outcome,
    pairs_written,
    testable,
)  # fmt: skip
from tokenswift.config import OPTIONS, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.spec.methods import STRATEGIES
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
DISTRIBUTION_LIMIT = 1e-5  # a distribution this unlikely is refused; an audit makes some ten tests


# ---- what was found -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a strategy's token differs from plain decoding's.

    Attributes:
        place: index of the new token.
        before: the text before it.
        plain, other: both tokens, as id and as text.
        scores: of both, in plain decoding: processed, with the noise; minus infinity: filtered out.
        near_tie: a change of two logits by no more than twice what passes of this model differ by
            (`logits.LogitError.error`, 0 where bits are equal) makes plain decoding choose the other.
    """

    place: int
    before: str
    plain: tuple[int, str]
    other: tuple[int, str]
    scores: tuple[float, float]
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text by one strategy against plain decoding.

    Attributes:
        tokens: new tokens compared, up to the first difference.
        length: mean acceptance length of the strategy's run.
        seconds: of the strategy's run, its prefill included.
        drafted: tokens drafted and checked; a strategy that drafted none in any text counts as not run.
        draft_source, heads: as in `types.Generation`.
    """

    strategy: str
    prompt: int
    sampling: str
    seed: int
    tokens: int
    length: float
    seconds: float
    divergence: Difference | None
    drafted: int = 1
    draft_source: str = "none"
    heads: dict[str, str] | None = None

    @property
    def near_tie(self) -> bool:
        """It differs by rounding."""
        return self.divergence is not None and self.divergence.near_tie

    @property
    def failed(self) -> bool:
        """It differs, and rounding does not explain it."""
        return self.divergence is not None and not self.divergence.near_tie

    @property
    def where(self) -> str:
        """The text and the place where it differs."""
        place = "" if self.divergence is None else f", new token {self.divergence.place}"
        return f"prompt {self.prompt}, {self.sampling}, seed {self.seed}{place}"


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """Whole runs of a strategy against the probabilities of what they write (`logits.Fit`).

    Attributes:
        case: the sampling.
        same: runs whose tokens equal plain decoding's with the same seed.
    """

    strategy: str
    case: str
    p: float
    samples: int
    variation: float
    same: int


@dataclass(slots=True)
class Report:
    """Everything that an audit found.

    Attributes:
        errors: of logits, by prompt.
        skipped: strategy → why it could not run here, or did not draft. It counts as not run,
            whatever it did before.
        shortened: number of a prompt → its tokens, of a prompt that was longer than the model's positions.
    """

    model: str
    dtype: str
    device: str
    errors: list[LogitError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    distributions: list[DistributionTest] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    shortened: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def near_ties(self) -> list[Comparison]:
        """Texts that differ by rounding alone."""
        return [c for c in self.comparisons if c.near_tie]

    @property
    def passed(self) -> list[Comparison]:
        """Texts by strategies that ran to the end and differ by rounding at most."""
        return [c for c in self.comparisons if c.strategy not in self.skipped and not c.failed]

    @property
    def strategies(self) -> list[str]:
        """The strategies whose texts all passed; a skipped one is not among them."""
        failed = {c.strategy for c in self.comparisons if c.failed}
        return [name for name in dict.fromkeys(c.strategy for c in self.passed) if name not in failed]

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty when the audit passed."""
        plain = "differs from plain decoding"
        found = [f"{c.strategy} {plain} ({c.where})" for c in self.comparisons if c.failed]
        for number, e in enumerate(self.errors, 1):
            if not e.sound:
                far = [f"{worst:.1e}, median {usual:.1e}" for worst, usual in (e.one_row, e.tree, e.allowed)]
                found.append(
                    f"logits are off from transformers' pass in float32 (prompt {number}): in one-row passes "
                    f"by {far[0]}, in tree passes by {far[1]}; valid: at most {far[2]}"
                )
        for t in self.distributions:
            if t.p < DISTRIBUTION_LIMIT:
                found.append(f"{t.strategy} does not follow the distribution ({t.case}, p = {t.p:.1e})")
            if t.same < t.samples:
                runs = f"{t.samples - t.same} of {counted(t.samples, 'run')}"
                found.append(f"{t.strategy} {plain} in {runs} of two tokens ({t.case})")
        if all(c.strategy in self.skipped for c in self.comparisons):
            found.append("nothing was compared")
        return found

    @property
    def headline(self) -> str:
        """The verdict in a few words, with everything that qualifies it."""
        if self.failures:
            return "NOT EXACT"
        ties = len(self.near_ties)
        text = f"exact up to {counted(ties, 'near-tie')}" if ties else "exact"
        return text + (f"; not run: {', '.join(self.skipped)}" if self.skipped else "")

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return _finite(
            {
                **asdict(self),
                "errors": [error.record() for error in self.errors],
                "verdict": self.headline,
                "strategies": self.strategies,
                "near_ties": len(self.near_ties),
                "tokens_compared": sum(c.tokens for c in self.comparisons),
                "failures": self.failures,
                "exact": not self.failures,
            }
        )

    def text(self) -> str:
        """Tables and verdict for people."""
        blocks = [f"Audit of {self.model}, {self.dtype} on {self.device}", "\n".join(self._tokens())]
        blocks += [_shown(c, c.divergence) for c in self.comparisons if c.divergence is not None]
        if self.errors:
            apart, one_row, tree, allowed = (
                max(e.error for e in self.errors),
                *(max(getattr(e, kind).worst for e in self.errors) for kind in ("one_row", "tree")),
                min(e.allowed.worst for e in self.errors),
            )
            blocks.append(
                f"Logits at {sum(e.positions for e in self.errors)} positions: one-row and tree passes "
                f"differ by at most {apart:.1e}, from transformers' pass in float32 by {one_row:.1e} and "
                f"{tree:.1e} (allowed: {allowed:.1e})"
            )
        for t in self.distributions:
            blocks.append(
                f"Distribution of the next two tokens, {t.strategy}, {t.case}: p {t.p:.3g}, total variation "
                f"{t.variation:.3f}, {t.same} of {counted(t.samples, 'run')} as plain decoding"
            )
        blocks += [f"Not run: {name} ({why})" for name, why in self.skipped.items()]
        for number, size in self.shortened.items():
            first = counted(size, "token")
            blocks.append(f"Prompt {number} was shortened to its first {first} (the model's positions)")
        strategies = counted(len(self.strategies), "strategy", "strategies")
        tokens = counted(sum(c.tokens for c in self.passed), "token")
        compared = f"{counted(len(self.passed), 'text')} by {strategies}, {tokens}"
        return "\n\n".join([*blocks, f"Verdict: {self.headline}. {'; '.join(self.failures) or compared}."])

    def _tokens(self) -> Iterator[str]:
        yield "Tokens against plain decoding, same seeds"
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            equal, drafted = sum(c.tokens for c in group), sum(c.drafted for c in group)
            ties, wrong = sum(c.near_tie for c in group), sum(c.failed for c in group)
            yield (
                f"  {', '.join(key)}: {counted(len(group), 'text')}, {counted(equal, 'token')} equal, "
                f"{counted(ties, 'near-tie')}, {counted(wrong, 'failure')}; {drafted:,} drafted, "
                f"{sum(c.length for c in group) / len(group):.2f} tokens a pass"
            )


def _shown(c: Comparison, d: Difference) -> str:
    return (
        f"{'Near-tie' if d.near_tie else 'FAILURE'}: {c.strategy}, {c.where}\n"
        f"  …{d.before!r}\n"
        f"  plain decoding: {d.plain[1]!r} ({d.plain[0]}), score {d.scores[0]:.6g}\n"
        f"  {c.strategy}: {d.other[1]!r} ({d.other[0]}), score {d.scores[1]:.6g}"
    )


def _finite(value: Any) -> Any:
    """The same JSON-ready values with None for infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the audit ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with options, under the name that tables show."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)


def variants(strategy: str, options: dict[str, Any]) -> list[Variant]:
    """What to audit: one strategy or "all". Without options partial caches are smaller than the text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]

    def own(name: str) -> dict[str, Any]:
        known = {one.name for one in fields(OPTIONS[name])}
        return {k: v for k, v in options.items() if k in known} if options else SMALL.get(name, {})

    return [Variant(name, name, own(name)) for name in names]


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
    for number, ids in enumerate(prompts, 1):
        work.compare(number, ids)
    work.leave_unused()
    if options.runs:
        for name, params in options.samplings.items():
            if not params.greedy:
                work.test_distribution(prompts, name, params)
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
        limit, new, prompts = self.llm.target.rotary.limit, self.options.tokens, self.options.prompts
        if limit is not None and new >= limit:
            valid = f"at most {limit - 1} (the model has {limit} positions)"
            raise InputError(f"max_new_tokens is {new}; valid: {valid}", "max_new_tokens")
        found = []
        for number, prompt in enumerate(prompts, 1):
            ids = self.llm.encode(prompt)
            if limit is not None and len(ids) + new > limit:
                self.say(
                    f"prompt {number} of {len(prompts)} has {counted(len(ids), 'token')}, "
                    f"shortened to its first {counted(limit - new, 'token')}: the model has {limit:,} "
                    f"positions, and {counted(new, 'token is', 'tokens are')} written"
                )
                ids = ids[: limit - new]
                self.report.shortened[number] = len(ids)
            found.append(ids)
        return found

    def compare(self, number: int, ids: list[int]) -> None:
        """A prompt with every sampling, seed and variant against plain decoding."""
        options, error = self.options, None
        for name, params in options.samplings.items():
            for seed in range(params.seed, params.seed + (1 if params.greedy else options.seeds)):
                where = f"prompt {number} of {len(options.prompts)}, {name}, seed {seed}"
                self.say(f"{where}: plain decoding")
                given = replace(params, seed=seed)
                made = self.llm.generate(ids, options.tokens, BASELINE, sampling=given, ignore_eos=True)
                plain = made.token_ids
                if error is None:
                    self.say(f"{where}: logits")
                    error = logit_error(self.llm, ids, plain)
                    self.report.errors.append(error)
                for variant in options.variants:
                    if variant.label not in self.report.skipped:
                        found = self._one(f"{where}: {variant.label}", variant, ids, plain, given, error)
                        if found is not None:
                            which = (variant.label, number, name, seed)
                            self.report.comparisons.append(Comparison(*which, *found))

    def _one(
        self,
        where: str,
        variant: Variant,
        ids: list[int],
        plain: list[int],
        params: SamplingParams,
        error: LogitError,
    ) -> tuple[Any, ...] | None:
        """What was found of a text by a variant, as `Comparison` has it; None: it cannot run."""
        start, drafted = time.monotonic(), list[int]()

        def count(step: Step) -> None:
            drafted.append(step.drafted)

        how = (variant.strategy, variant.options, params)
        try:
            got = self.llm.generate(ids, len(plain), *how, ignore_eos=True, on_step=count)
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
        equal, length = len(plain) if place is None else place, got.metrics.mean_acceptance_length
        return equal, length, seconds, found, sum(drafted), got.draft_source, got.heads

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say nothing of it:
        it counts as not run."""
        for variant in self.options.variants:
            rows = [c for c in self.report.comparisons if c.strategy == variant.label]
            if variant.strategy != BASELINE and rows and not any(c.drafted for c in rows):
                self.report.skipped[variant.label] = (
                    f"it drafted nothing on these texts; it may draft from: {rows[0].draft_source}"
                )

    def test_distribution(self, prompts: list[list[int]], name: str, params: SamplingParams) -> None:
        """Whole runs, two tokens each, against the model's probabilities: behind the first prompt that leaves
        a choice."""
        llm, report, most = self.llm, self.report, self.options.runs
        ends = (ids[-CONTEXT:] for ids in prompts)
        prompt = next((ids for ids in ends if testable(likely_pairs(llm, ids, params, FEWEST))), None)
        if prompt is None:
            why = f"no prompt whose next two tokens {FEWEST} runs can tell apart"
            report.skipped[f"distribution, {name}"] = why
            return
        plain: list[tuple[int, ...]] = []
        drafting = [v for v in self.options.variants if v.strategy != BASELINE]
        for variant in [Variant(BASELINE, BASELINE), *drafting]:
            if variant.label in report.skipped:
                continue
            runs = most if variant.strategy == BASELINE else max(FEWEST, most // DRAFTED)
            self.say(f"distribution, {name}: {runs} runs of {variant.label}")
            law = likely_pairs(llm, prompt, params, runs)
            seen = list(pairs_written(llm, prompt, variant.strategy, variant.options, params, runs))
            plain = plain or seen
            same = sum(a == b for a, b in zip(plain, seen, strict=False))
            fit = chi_square((outcome(pair, law) for pair in seen), law)
            report.distributions.append(DistributionTest(variant.label, name, *fit, same))
