"""What an audit found: tables, a verdict, and a record for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenswift.audit.logits import LogitError
from tokenswift.words import counted

DISTRIBUTION_LIMIT = 1e-5  # a distribution this unlikely is refused; an audit makes some ten tests


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
    """Whole runs of a strategy against the probabilities of what they write.

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
        found = [
            f"{c.strategy} differs from plain decoding ({c.where})" for c in self.comparisons if c.failed
        ]
        for number, error in enumerate(self.errors, 1):
            if not error.sound:
                found.append(
                    f"logits are off from transformers' pass in float32 (prompt {number}): in one-row passes "
                    f"by {error.one_row.worst:.1e}, median {error.one_row.typical:.1e}, in tree passes by "
                    f"{error.tree.worst:.1e}, median {error.tree.typical:.1e}; valid: at most "
                    f"{error.allowed.worst:.1e}, median {error.allowed.typical:.1e}"
                )
        for test in self.distributions:
            if test.p < DISTRIBUTION_LIMIT:
                found.append(
                    f"{test.strategy} does not follow the distribution ({test.case}, p = {test.p:.1e})"
                )
            if test.same < test.samples:
                found.append(
                    f"{test.strategy} differs from plain decoding in {test.samples - test.same} of "
                    f"{counted(test.samples, 'run')} of two tokens ({test.case})"
                )
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
        blocks = [f"Audit of {self.model}, {self.dtype} on {self.device}", self._tokens()]
        blocks += [_shown(c, c.divergence) for c in self.comparisons if c.divergence is not None]
        if self.errors:
            one_row, tree = (max(getattr(e, name).worst for e in self.errors) for name in ("one_row", "tree"))
            apart, allowed = max(e.error for e in self.errors), min(e.allowed.worst for e in self.errors)
            blocks.append(
                f"Logits at {sum(e.positions for e in self.errors)} positions: one-row and tree passes "
                f"differ by at most {apart:.1e}, from transformers' pass in float32 by {one_row:.1e} and "
                f"{tree:.1e} (allowed: {allowed:.1e})"
            )
        if self.distributions:
            blocks.append(self._distributions())
        blocks += [f"Not run: {name} ({why})" for name, why in self.skipped.items()]
        blocks += [
            f"Prompt {number} was shortened to its first {counted(tokens, 'token')} (the model's positions)"
            for number, tokens in self.shortened.items()
        ]
        compared = (
            f"{counted(len(self.passed), 'text')} by "
            f"{counted(len(self.strategies), 'strategy', 'strategies')}, "
            f"{counted(sum(c.tokens for c in self.passed), 'token')}"
        )
        return "\n\n".join([*blocks, f"Verdict: {self.headline}. {'; '.join(self.failures) or compared}."])

    def _tokens(self) -> str:
        head = ("texts", "tokens equal", "near-ties", "failures", "drafted", "tokens/pass")
        rows: list[tuple[str, ...]] = [("strategy", "sampling", *head)]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            ties, wrong = sum(c.near_tie for c in group), sum(c.failed for c in group)
            counts = (len(group), sum(c.tokens for c in group), ties, wrong, sum(c.drafted for c in group))
            rows.append((*key, *map(str, counts), f"{sum(c.length for c in group) / len(group):.2f}"))
        return "Tokens against plain decoding, same seeds\n" + _table(rows)

    def _distributions(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("strategy", "sampling", "runs", "p", "total variation", "same as plain")
        ]
        for test in self.distributions:
            same = f"{test.same} of {test.samples}"
            p = f"{test.p:.3f}" if test.p >= 0.001 else f"{test.p:.0e}"
            rows.append((test.strategy, test.case, str(test.samples), p, f"{test.variation:.3f}", same))
        return "Distribution of the next two tokens against the model's probabilities\n" + _table(rows)


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


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns, the first row as a head; text left, figures right."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(size) if column < 2 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
