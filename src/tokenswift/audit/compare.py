"""The audit: tokens and logits on the user's model, the distribution where asked, and what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from itertools import zip_longest
from typing import Any

import msgspec

from tokenswift.audit import logits
from tokenswift.config import SamplingParams, names_of
from tokenswift.engine.llm import LLM
from tokenswift.spec.methods import STRATEGIES
from tokenswift.types import InputError, Step
from tokenswift.words import counted

BASELINE = "autoregressive"
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
class Comparison:
    """One text by one strategy against plain decoding.

    Attributes:
        prompt: its number, from 1.
        tokens: new tokens compared, up to the first difference.
        difference: where the first token differs, the text before it, and both tokens with the scores that
            plain decoding gives them; None for equal texts.
        drafted: tokens drafted and checked; a strategy that drafted none in any text counts as not run.
    """

    strategy: str
    prompt: int
    sampling: str
    seed: int
    tokens: int
    difference: str | None
    drafted: int


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """Whole runs of a strategy against the probabilities of what they write.

    Attributes:
        case: the sampling.
        p: of `logits.chi_square`.
        same: runs whose tokens equal plain decoding's with the same seed.
    """

    strategy: str
    case: str
    p: float
    runs: int
    same: int

    def __str__(self) -> str:
        fits = f"distribution of two tokens, {self.strategy}, {self.case}: p {self.p:.1e}"
        return f"{fits}, {self.same} of {counted(self.runs, 'run')} as plain decoding"


@dataclass(slots=True)
class Report:
    """Everything that an audit found.

    Attributes:
        errors: of logits, by prompt.
        skipped: strategy → why it could not run here, or did not draft. It counts as not run,
            whatever it did before.
    """

    model: str
    dtype: str
    device: str
    errors: list[logits.LogitError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    distributions: list[DistributionTest] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say nothing of it:
        it counts as not run."""
        idle = {c.strategy for c in self.comparisons} - {BASELINE, *self.skipped}
        idle -= {c.strategy for c in self.comparisons if c.drafted}
        self.skipped |= dict.fromkeys(sorted(idle), "it drafted nothing on these texts")

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty when the audit passed."""
        found = [
            f"{c.strategy} differs from plain decoding (prompt {c.prompt}, {c.sampling}, seed {c.seed}, "
            f"{c.difference})"
            for c in self.comparisons
            if c.difference is not None
        ]
        found += [f"logits of prompt {n}: {e}" for n, e in enumerate(self.errors, 1) if not e.sound]
        found += [str(t) for t in self.distributions if t.p < DISTRIBUTION_LIMIT or t.same < t.runs]
        if all(c.strategy in self.skipped for c in self.comparisons):
            found.append("nothing was compared")
        return found

    @property
    def headline(self) -> str:
        """The verdict in a few words, with everything that qualifies it."""
        if self.failures:
            return "NOT EXACT"
        return f"exact; not run: {', '.join(self.skipped)}" if self.skipped else "exact"

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready values; what is infinite is None."""
        told = {
            **asdict(self),
            "errors": [{**asdict(error), "sound": error.sound} for error in self.errors],
            "verdict": self.headline,
            "failures": self.failures,
            "exact": not self.failures,
        }
        return msgspec.json.decode(msgspec.json.encode(told))

    def text(self) -> str:
        """Findings and verdict for people."""
        lines = [f"Audit of {self.model}, {self.dtype} on {self.device}, against plain decoding:"]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            equal, drafted = sum(c.tokens for c in group), sum(c.drafted for c in group)
            texts = f"{counted(len(group), 'text')}, {counted(equal, 'token')} equal, {drafted:,} drafted"
            lines.append(f"  {', '.join(key)}: {texts}")
        lines += [f"  logits of prompt {n}: {e}" for n, e in enumerate(self.errors, 1)]
        lines += [f"  {t}" for t in self.distributions]
        lines += [f"  not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join([*lines, f"Verdict: {'; '.join([self.headline, *self.failures])}."])


# ---- the audit ------------------------------------------------------------------------------------


def variants(strategy: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by strategy, of one or "all". Without options partial caches are smaller than the text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    given = {name: {k: options[k] for k in options if k in names_of(name)} for name in names}
    return given if options else {name: SMALL.get(name, {}) for name in names}


def split_prompts(text: str) -> list[str]:
    """The prompts of a file: texts with lines of ``---`` between them."""
    parts = re.split(r"^\s*---\s*$", text, flags=re.MULTILINE)
    return [part.strip() for part in parts if part.strip()]


def shipped_prompts() -> list[str]:
    """A story, a list of instructions, and a piece of program."""
    data = resources.files("tokenswift").joinpath("data")
    files = ("demo_prompt.txt", "audit_prompts.txt")
    return [p for name in files for p in split_prompts(data.joinpath(name).read_text(encoding="utf-8"))]


def difference(
    llm: LLM, ids: list[int], plain: list[int], others: list[int], params: SamplingParams
) -> tuple[int, str | None]:
    """How many tokens after a prompt are plain decoding's, and what is next where they are not all: a score
    is plain decoding's, processed and with the noise, minus infinity where a filter took the token."""
    pairs = enumerate(zip_longest(plain, others))
    place = next((i for i, (one, other) in pairs if one != other), None)
    if place is None:
        return len(plain), None
    text = [*ids, *plain[:place]]
    scores = llm.target.sampler(params).perturbed(logits.last_logits(llm, text)[None], text, [[]])[0]
    shown = llm.tokenizer.decode if llm.tokenizer is not None else lambda ids: " ".join(map(str, ids))
    own, other = (
        f"{shown([one])!r} ({one}), score {float(scores[one]):.6g}" for one in (plain[place], others[place])
    )
    return place, f"new token {place}: {other} instead of {own}, after …{shown(text)[-BEFORE:]!r}"


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit.

    Attributes:
        variants: options by strategy; of several, one that cannot run here is skipped.
        prompts: text or token ids.
        samplings: name → parameters.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        runs: runs of plain decoding that test the distribution (strategies: a fifth, at least 100); 0: it
            is not tested.
        say: gets a line of progress now and then.
    """

    llm: LLM
    variants: dict[str, dict[str, Any]]
    prompts: list[str | list[int]]
    samplings: dict[str, SamplingParams]
    tokens: int = 64
    seeds: int = 1
    runs: int = 0
    say: Callable[[str], None] = lambda line: None

    def run(self) -> Report:
        """Make it.

        Raises:
            InputError: a prompt, a number of new tokens or a strategy that the model cannot run; a
                distribution to test, and greedy decoding alone.
        """
        if self.runs and all(params.greedy for params in self.samplings.values()):
            raise InputError(f"distribution is {self.runs}; valid: 0 with greedy decoding", "distribution")
        report, prompts = Report(self.llm.name, self.llm.dtype, self.llm.device), self._fitting()
        for number, ids in enumerate(prompts, 1):
            for name, params in self.samplings.items():
                for seed in range(params.seed, params.seed + (1 if params.greedy else self.seeds)):
                    self._compare(report, number, ids, name, replace(params, seed=seed))
        report.leave_unused()
        for name, params in self.samplings.items():
            if self.runs and not params.greedy:
                self._test_distribution(report, prompts, name, params)
        return report

    def _fitting(self) -> list[list[int]]:
        """The prompts as token ids, each cut to what leaves room for the new tokens in the model's positions;
        says which were."""
        limit, found = self.llm.target.rotary.limit, [self.llm.encode(prompt) for prompt in self.prompts]
        room = 2**63 - 1 if limit is None else limit - self.tokens
        if room < 1:
            valid = f"at most {self.tokens + room - 1} (the model has {limit} positions)"
            raise InputError(f"max_new_tokens is {self.tokens}; valid: {valid}", "max_new_tokens")
        for number, ids in enumerate(found, 1):
            if len(ids) > room:
                short = f"is shortened to its first {counted(room, 'token')}"
                self.say(f"prompt {number} of {len(found)} {short} (the model has {limit} positions)")
        return [ids[:room] for ids in found]

    def _compare(
        self, report: Report, number: int, ids: list[int], name: str, params: SamplingParams
    ) -> None:
        """A prompt by every strategy against plain decoding, with one sampling and seed."""
        where = f"prompt {number} of {len(self.prompts)}, {name}, seed {params.seed}"
        self.say(f"{where}: plain decoding")
        plain = self.llm.generate(ids, self.tokens, BASELINE, sampling=params, ignore_eos=True).token_ids
        if len(report.errors) < number:
            self.say(f"{where}: logits")
            report.errors.append(logits.logit_error(self.llm, ids, plain))
        for strategy in [name for name in self.variants if name not in report.skipped]:
            self.say(f"{where}: {strategy}")
            steps: list[Step] = []
            how = (strategy, self.variants[strategy], params)
            try:
                got = self.llm.generate(ids, len(plain), *how, ignore_eos=True, on_step=steps.append)
            except InputError as refused:
                if len(self.variants) == 1:
                    raise
                report.skipped[strategy] = str(refused)
                continue
            found = difference(self.llm, ids, plain, got.token_ids, params)
            drafted = sum(step.drafted for step in steps)
            report.comparisons.append(Comparison(strategy, number, name, params.seed, *found, drafted))

    def _test_distribution(
        self, report: Report, prompts: list[list[int]], name: str, params: SamplingParams
    ) -> None:
        """Whole runs, two tokens each, against the model's probabilities: behind the first prompt that leaves
        a choice."""
        ends = (ids[-logits.CONTEXT :] for ids in prompts)
        prompt = next((ids for ids in ends if logits.testable(self.llm, ids, params)), None)
        if prompt is None:
            report.skipped[f"distribution, {name}"] = "too few runs to tell apart what may follow the prompts"
            return
        plain: list[logits.Pair] = []
        for strategy, given in {BASELINE: {}, **self.variants}.items():
            if strategy in report.skipped:
                continue
            runs = self.runs if strategy == BASELINE else max(logits.FEWEST, self.runs // DRAFTED)
            self.say(f"distribution, {name}: {runs} runs of {strategy}")
            law = logits.likely_pairs(self.llm, prompt, params, runs)
            seen = logits.pairs_written(self.llm, prompt, strategy, given, params, runs)
            plain = plain or seen
            same = sum(a == b for a, b in zip(plain, seen, strict=False))
            p = logits.chi_square((logits.outcome(pair, law) for pair in seen), law)
            report.distributions.append(DistributionTest(strategy, name, p, runs, same))
