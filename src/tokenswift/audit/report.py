"""What an audit found: tables, a verdict in plain words, and a record for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tokenswift.audit.equality import Divergence
from tokenswift.audit.passes import NumericError

LAW_LIMIT = 1e-5  # a law this unlikely is refused; some thirty tests are made in an audit
BIAS_LIMIT = 1e-6  # the published rule has to fail at least this clearly


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text by one strategy against plain decoding.

    Attributes:
        tokens: new tokens compared, up to the first difference.
        length: mean acceptance length of the strategy's run.
        seconds: of the strategy's run, its prefill included.
    """

    strategy: str
    prompt: int
    sampling: str
    seed: int
    tokens: int
    length: float
    seconds: float
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class LawTest:
    """Whole runs on the toy model against its enumerated law.

    Attributes:
        same: runs whose tokens equal plain decoding's with the same seed (None: not compared).
    """

    strategy: str
    case: str
    p: float
    samples: int
    variation: float
    same: int | None = None


@dataclass(slots=True)
class Report:
    """Everything that an audit found.

    Attributes:
        errors: numeric error by prompt, None where there was nothing to measure.
        skipped: strategy → why it could not run here.
    """

    model: str
    dtype: str
    device: str
    errors: list[NumericError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    laws: list[LawTest] = field(default_factory=list)
    published: list[LawTest] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def near_ties(self) -> list[Comparison]:
        """Texts that differ by rounding alone."""
        return [c for c in self.comparisons if c.divergence is not None and c.divergence.near_tie]

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
                    f"tree passes differ from the model's own pass by {error.tree:.1e} where one-row passes "
                    f"differ by {error.one_row:.1e} (prompt {number}): they do not compute the same"
                )
        for test in self.laws:
            if test.p < LAW_LIMIT:
                found.append(f"{test.strategy} does not follow the law ({test.case}, p = {test.p:.1e})")
            if test.same is not None and test.same < test.samples:
                found.append(
                    f"{test.strategy} differs from plain decoding in {test.samples - test.same} of "
                    f"{test.samples} runs on the toy model ({test.case})"
                )
        for test in self.published:
            if test.p >= BIAS_LIMIT:
                found.append(
                    f"the published rule passed the test of the law ({test.case}, p = {test.p:.1e}): "
                    f"the test is too weak to prove anything"
                )
        if not self.comparisons:
            found.append("nothing was compared")
        return found

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        made = asdict(self)
        for c, row in zip(self.comparisons, made["comparisons"], strict=True):
            if c.divergence is not None:
                row["divergence"]["near_tie"] = c.divergence.near_tie
        for row in [*made["errors"], *(row["divergence"] or {} for row in made["comparisons"])]:
            for name, value in row.items():
                if value == float("inf"):
                    row[name] = None  # JSON has no infinity
        made["near_ties"] = len(self.near_ties)
        made["tokens_compared"] = sum(c.tokens for c in self.comparisons)
        made["failures"] = self.failures
        made["exact"] = not self.failures
        return made

    def text(self) -> str:
        """Tables and verdict for people."""
        blocks = [f"Audit of {self.model}, {self.dtype} on {self.device}", self._equality(), *self._shown()]
        if self.errors:
            worst = max(self.errors, key=lambda error: error.error)
            blocks.append(
                f"Numeric error, measured at {sum(e.positions for e in self.errors)} positions: logits of "
                f"one-row and of tree passes differ by at most {worst.error:.1e}; from transformers' own "
                f"pass over the whole text they differ by {worst.one_row:.1e} and {worst.tree:.1e}."
            )
        if self.laws:
            blocks.append(self._laws())
        blocks += [f"Not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n\n".join([*blocks, self.verdict()])

    def verdict(self) -> str:
        """Passed or failed, in plain words."""
        total = sum(c.tokens for c in self.comparisons)
        if self.failures:
            return "Verdict: NOT EXACT. " + "; ".join(self.failures) + "."
        text = (
            f"Verdict: exact. {len(self.comparisons)} texts by {len({c.strategy for c in self.comparisons})} "
            f"strategies, {total} tokens: "
        )
        if self.near_ties:
            text += (
                f"{len(self.near_ties)} of them leave plain decoding's text at a near-tie, where two tokens "
                f"score alike within the rounding error of {self.dtype}; everything before it is identical"
            )
        else:
            text += "every token is the one that plain decoding writes"
        if self.laws:
            text += (
                f". On a toy model of the same family whole runs follow the exact law "
                f"(smallest p of {len(self.laws)} tests: {min(t.p for t in self.laws):.2g})"
            )
        if self.published:
            text += f"; the published rule fails the same test (p ≤ {max(t.p for t in self.published):.0e})"
        return text + "."

    # ---- parts ----------------------------------------------------------------------------------

    def _equality(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("strategy", "sampling", "texts", "tokens equal", "near-ties", "failures", "tokens/pass")
        ]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            ties = sum(c in self.near_ties for c in group)
            wrong = sum(c.divergence is not None for c in group) - ties
            length = sum(c.length for c in group) / len(group)
            counts = (len(group), sum(c.tokens for c in group), ties, wrong)
            rows.append((*key, *map(str, counts), f"{length:.2f}"))
        return "Tokens against plain decoding, same seeds\n" + table(rows)

    def _laws(self) -> str:
        rows: list[tuple[str, ...]] = [("strategy", "case", "runs", "p", "total variation", "same as plain")]
        for test in [*self.laws, *self.published]:
            same = "–" if test.same is None else f"{test.same} of {test.samples}"
            p = f"{test.p:.3f}" if test.p >= 0.001 else f"{test.p:.0e}"
            rows.append((test.strategy, test.case, str(test.samples), p, f"{test.variation:.3f}", same))
        return "Law of the next 3 tokens on a toy model of the same family, against enumeration\n" + table(
            rows
        )

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
                f"choice;\n  the passes differ by {d.difference:.2e} here; measured error {d.error:.2e}"
                + ("" if d.reproduced else "\n  the tokens do not follow from the passes' own scores")
            )
        return found


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
