"""What an audit found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import msgspec

from tokenswift.audit.logits import LogitError
from tokenswift.checks import counted
from tokenswift.models.quality import Quality

BASELINE = "autoregressive"
MOST_RATIO = 1.005  # of perplexities in int8 and in float32
STANDARD_ERRORS = 2  # by which the ratio must be above that, to be surely above it


Record = dict[str, object]  # JSON-ready values


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text by one strategy against plain decoding.

    Attributes:
        prompt: its number, from 1.
        tokens: new tokens compared, up to the first difference.
        difference: where the first token differs, the text before it, and both tokens with the
            scores that plain decoding gives them; None for equal texts.
        drafted: tokens drafted and checked; a strategy that drafted none in any text counts as not
            run.
    """

    strategy: str
    prompt: int
    sampling: str
    seed: int
    tokens: int
    difference: str | None
    drafted: int


@dataclass(slots=True)
class Report:
    """Everything that an audit found.

    Attributes:
        errors: errors of logits, a prompt each.
        skipped: strategy → why it could not run here, or did not draft. It counts as not run,
            whatever it did before.
        quality: what int8 costs, compared with float32; None for a model in floats.
    """

    model: str
    dtype: str
    device: str
    errors: list[LogitError] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    quality: Quality | None = None

    def leave_unused(self) -> None:
        """A strategy that drafted nothing ran the passes of plain decoding, so its tokens say
        nothing of it: it counts as not run."""
        idle = {c.strategy for c in self.comparisons} - {BASELINE, *self.skipped}
        idle -= {c.strategy for c in self.comparisons if c.drafted}
        self.skipped |= dict.fromkeys(sorted(idle), "it drafted nothing on these texts")

    @property
    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty when the audit passed."""
        failures = [
            f"{c.strategy} differs from plain decoding (prompt {c.prompt}, {c.sampling}, seed "
            f"{c.seed}, {c.difference})"
            for c in self.comparisons
            if c.difference is not None
        ]
        for number, error in enumerate(self.errors, 1):
            if not error.sound:
                failures.append(f"logits of prompt {number}: {error}")
        if all(c.strategy in self.skipped for c in self.comparisons):
            failures.append("nothing was compared")
        if self.quality is not None and surely_worse(self.quality):
            failures.append(
                f"int8 writes worse: {self.quality}; valid: at most {MOST_RATIO} times. "
                "--kv-cache-dtype bfloat16, or --dtype float32, keeps more"
            )
        return failures

    @property
    def headline(self) -> str:
        """The verdict in a few words, with everything that qualifies it."""
        if self.failures:
            return "NOT EXACT"
        return f"exact; not run: {', '.join(self.skipped)}" if self.skipped else "exact"

    def record(self) -> Record:
        """The report as JSON-ready values; what is infinite is None."""
        record: Record = {
            **asdict(self),
            "errors": [{**asdict(error), "sound": error.sound} for error in self.errors],
            "verdict": self.headline,
            "failures": self.failures,
            "exact": not self.failures,
        }
        return msgspec.json.decode(msgspec.json.encode(record))

    def text(self) -> str:
        """Findings and verdict for people."""
        lines = [f"Audit of {self.model}, {self.dtype} on {self.device}, against plain decoding:"]
        for key in dict.fromkeys((c.strategy, c.sampling) for c in self.comparisons):
            group = [c for c in self.comparisons if (c.strategy, c.sampling) == key]
            texts = counted(len(group), "text")
            equal = counted(sum(c.tokens for c in group), "token")
            drafted = sum(c.drafted for c in group)
            lines.append(f"  {', '.join(key)}: {texts}, {equal} equal, {drafted:,} drafted")
        for number, error in enumerate(self.errors, 1):
            lines.append(f"  logits of prompt {number}: {error}")
        if self.quality is not None:
            lines.append(f"  int8: {self.quality}")
        lines += [f"  not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join([*lines, f"Verdict: {'; '.join([self.headline, *self.failures])}."])


def surely_worse(quality: Quality) -> bool:
    """Whether perplexity has risen by more than it may, whatever the text."""
    least = quality.ratio - STANDARD_ERRORS * quality.error
    return not least <= MOST_RATIO  # NaN, too
