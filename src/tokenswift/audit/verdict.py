"""What an audit found: tables, a verdict in plain words, and a record for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenswift.audit.equality import Divergence
from tokenswift.audit.logits import NumericError
from tokenswift.audit.rounding import Distance
from tokenswift.words import counted

DISTRIBUTION_LIMIT = 1e-5  # a distribution this unlikely is refused; an audit makes some ten tests


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
    divergence: Divergence | None
    drafted: int = 1
    draft_source: str = "none"
    heads: dict[str, str] | None = None


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
        errors: numeric error by prompt.
        skipped: strategy → why it could not run here, or did not draft. It counts as not run,
            whatever it did before.
        shortened: number of a prompt → its tokens, of a prompt that was longer than the model's positions.
    """

    model: str
    dtype: str
    device: str
    errors: list[NumericError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    distributions: list[DistributionTest] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    shortened: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def near_ties(self) -> list[Comparison]:
        """Texts that differ by rounding alone."""
        return [c for c in self.comparisons if c.divergence is not None and c.divergence.near_tie]

    @property
    def passed(self) -> list[Comparison]:
        """Texts by strategies that ran to the end and differ by rounding at most."""
        return [
            c
            for c in self.comparisons
            if c.strategy not in self.skipped and (c.divergence is None or c.divergence.near_tie)
        ]

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty when the audit passed."""
        found = []
        for c in self.comparisons:
            if c.divergence is not None and not c.divergence.near_tie:
                found.append(
                    f"{c.strategy} differs from plain decoding at new token {c.divergence.place} "
                    f"(prompt {c.prompt}, {c.sampling}, seed {c.seed}), and rounding does not explain it"
                )
        for number, error in enumerate(self.errors, 1):
            if not error.sound:
                found.append(
                    f"passes do not compute what transformers' own pass computes (prompt {number}): one-row "
                    f"passes are off by {_both(error.one_row)}, tree passes by {_both(error.tree)}; rounding "
                    f"explains {_both(error.rounding.allowed)} (greatest, median over positions)"
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

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        made = asdict(self)
        for c, row in zip(self.comparisons, made["comparisons"], strict=True):
            if c.divergence is not None:
                row["divergence"]["near_tie"] = c.divergence.near_tie
        made["errors"] = [error.record() for error in self.errors]
        made["verdict"] = self.headline
        made["strategies"] = self.strategies
        made["near_ties"] = len(self.near_ties)
        made["tokens_compared"] = sum(c.tokens for c in self.comparisons)
        made["failures"] = self.failures
        made["exact"] = not self.failures
        return _finite(made)

    def text(self) -> str:
        """Tables and verdict for people."""
        blocks = [f"Audit of {self.model}, {self.dtype} on {self.device}", self._equality(), *self._shown()]
        if self.errors:
            blocks.append(_numeric(self.dtype, self.errors))
        if self.distributions:
            blocks.append(self._distributions())
        blocks += [f"Not run: {name} ({why})" for name, why in self.skipped.items()]
        blocks += [
            f"Prompt {number} was shortened to its first {counted(tokens, 'token')} (the model's positions)"
            for number, tokens in self.shortened.items()
        ]
        return "\n\n".join([*blocks, self.verdict()])

    @property
    def strategies(self) -> list[str]:
        """The strategies whose texts all passed; a skipped one is not among them."""
        failed = {c.strategy for c in self.comparisons if c.divergence and not c.divergence.near_tie}
        return [name for name in dict.fromkeys(c.strategy for c in self.passed) if name not in failed]

    @property
    def headline(self) -> str:
        """The verdict in a few words, with everything that qualifies it."""
        if self.failures:
            return "NOT EXACT"
        ties = len(self.near_ties)
        text = f"exact up to {counted(ties, 'near-tie')}" if ties else "exact"
        return text + (f"; not run: {', '.join(self.skipped)}" if self.skipped else "")

    def verdict(self) -> str:
        """Passed or failed, in plain words."""
        if self.failures:
            return f"Verdict: {self.headline}. " + "; ".join(self.failures) + "."
        text = (
            f"Verdict: {self.headline}. {counted(len(self.passed), 'text')} by "
            f"{counted(len(self.strategies), 'strategy', 'strategies')}, "
            f"{counted(sum(c.tokens for c in self.passed), 'token')}: "
        )
        if self.near_ties:
            text += (
                f"{len(self.near_ties)} of them leave plain decoding's text at a near-tie, where two tokens "
                f"score alike within the rounding error of {self.dtype}; everything before it is identical"
            )
        else:
            text += "every token is the one that plain decoding writes"
        if self.distributions:
            text += (
                f". Whole runs follow the distribution that transformers' pass gives (smallest p of "
                f"{counted(len(self.distributions), 'test')}: {min(t.p for t in self.distributions):.2g})"
            )
        return text + "."

    # ---- parts ----------------------------------------------------------------------------------

    def _equality(self) -> str:
        rows: list[tuple[str, ...]] = [
            (
                "strategy",
                "sampling",
                "texts",
                "tokens equal",
                "near-ties",
                "failures",
                "drafted",
                "tokens/pass",
            )
        ]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            ties = sum(c in self.near_ties for c in group)
            wrong = sum(c.divergence is not None for c in group) - ties
            length = sum(c.length for c in group) / len(group)
            counts = (len(group), sum(c.tokens for c in group), ties, wrong, sum(c.drafted for c in group))
            rows.append((*key, *map(str, counts), f"{length:.2f}"))
        return "Tokens against plain decoding, same seeds\n" + table(rows)

    def _distributions(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("strategy", "sampling", "runs", "p", "total variation", "same as plain")
        ]
        for test in self.distributions:
            same = f"{test.same} of {test.samples}"
            p = f"{test.p:.3f}" if test.p >= 0.001 else f"{test.p:.0e}"
            rows.append((test.strategy, test.case, str(test.samples), p, f"{test.variation:.3f}", same))
        return "Distribution of the next two tokens against transformers' pass\n" + table(rows)

    def _shown(self) -> list[str]:
        found = []
        for c in self.comparisons:
            d = c.divergence
            if d is None:
                continue
            found.append(
                f"{'Near-tie' if d.near_tie else 'FAILURE'}: {c.strategy}, prompt {c.prompt}, {c.sampling}, "
                f"seed {c.seed}, new token {d.place}\n"
                f"  …{d.before!r}\n"
                f"  plain decoding: {d.plain[1]!r} ({d.plain[0]})\n"
                f"  {c.strategy}: {d.other[1]!r} ({d.other[0]})\n"
                f"  best two scores {d.gap:.2e} apart; a change of {d.shift:.2e} in two logits flips the "
                f"choice;\n  the passes differ by {d.difference:.2e} here; rounding error {d.error:.2e}\n"
                f"  from transformers' own pass they are off by {d.off:.2e} (rounding explains "
                f"{d.allowed:.2e}), whose choice\n  a change of {d.reference_shift:.2e} flips"
                + ("" if d.reproduced else "\n  the tokens do not follow from the passes' own scores")
            )
        return found


def _both(distance: Distance) -> str:
    return f"{distance.worst:.1e} and {distance.typical:.1e}"


def _numeric(dtype: str, errors: list[NumericError]) -> str:
    """The numeric error of one or more texts in words: the worst of each figure."""
    one_row, tree = max(e.one_row.worst for e in errors), max(e.tree.worst for e in errors)
    own, allowed = max(e.rounding.own.worst for e in errors), max(e.rounding.allowed.worst for e in errors)
    return (
        f"Numeric error, measured at {sum(e.positions for e in errors)} positions: logits of one-row and of "
        f"tree passes differ by at most {max(e.error for e in errors):.1e}. From transformers' own pass over "
        f"the whole text in finer arithmetic they differ by {one_row:.1e} and {tree:.1e}; transformers' pass "
        f"in {dtype} by {own:.1e}, and a pass that computes the same by at most {allowed:.1e}."
    )


def _finite(value: Any) -> Any:
    """The same JSON-ready values with None for infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns, the first row as a head; text left, figures right."""
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(size) if column < 2 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
