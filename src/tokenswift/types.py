"""The nouns of the library, checks of single values (errors name the field, the value and what is
valid), and the legend of shape letters.

Shape letters used in signatures and comments everywhere:

====  ==============================================================
n     rows of one model pass (tree nodes, or tokens of a prompt chunk)
T     tokens in the full KV cache (committed ones; the root is not in it)
L     keys that one pass attends to (T + n, or the partial budget + n)
V     vocabulary size
D     width of the model's hidden state
H     query heads;  K: key/value heads;  d: width of one head
W     width of the contextual-penalty window
γ     depth of the draft (tokens drafted ahead on one path)
====  ==============================================================
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from time import perf_counter
from typing import Any


class InputError(ValueError):
    """Bad input from the user. One line that names the value and what is valid; CLI exit code 2.

    Attributes:
        field: the argument or field that is wrong, by its Python name; None where it is no single
            one.
    """

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Cancelled(Exception):
    """The request was cancelled while its sequence drafted; nothing of that step is kept."""


class RunError(RuntimeError):
    """The run failed after it had started. One line: what failed and what was kept; CLI exit code
    1."""


#: called with the stage ("load" in tensors, "pack" in layers, "prompt" in tokens), the part done
#: and the total, which the last call of a stage reaches
OnProgress = Callable[[str, int, int], None]

#: sources of tokens; journals store the first letter. "head" includes passes of the target that
#: draft
SOURCES = ("target", "head", "ngram", "chain", "grammar", "eagle", "recycle")


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of drafted tokens; parents precede their children.

    Node 0 is the root: the newest token of the text, known but not yet in the KV cache.
    All tuples but ``branches`` have one entry per node.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent; -1 for the root.
        depths: distance from the root; the node's position is ``position of root + depth``.
        sources: the source of each node, one of :data:`SOURCES`; "ngram" only if no other proposed
            it.
        gamma: γ, the depth drafted in this step (0 for a root alone), the denominator of the
            acceptance rate.
        branches: the last node of each n-gram branch, in the order of drafting; a branch may end
            inside the tree or repeat another path (the published rule draws for it all the same).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    sources: tuple[str, ...]
    gamma: int
    branches: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node`` (empty for the root)."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of a tree.

    Attributes:
        nodes: accepted nodes in order, the root (0) first; their cache entries are committed.
        token: the target's own token after the last of them (the recovered or bonus token).
    """

    nodes: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a new token was at its place, under the distribution that it was drawn from (after
    penalty, temperature and filters; with ``greedy`` after the penalty alone).

    Attributes:
        logprob: natural logarithm of its probability.
        top: the likeliest token ids there with theirs, best first; those that a filter left.
        rank: its rank among all tokens, 1 for the likeliest; equally likely ones share a rank.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a sequence in the decode loop, as ``LLM.stream`` yields it.

    Attributes:
        token_ids: new tokens of this step (accepted ones, then the target's own), at least one.
        drafted: drafted nodes that the target checked (without the root).
        accepted: drafted tokens accepted.
        ngram_accepted: those of them on n-gram branches.
        gamma: γ of the step's tree.
        sources: the source of each new token, one of :data:`SOURCES`; the last is the target's own
            ("target") unless the text ended before it.
        text: new text, complete characters only ("" inside the decode loop).
        chars: number of characters of ``text`` that each new token completed; the end may add more.
        logprobs: of each new token, where they were asked for.
        times: seconds by phase (draft, verify, choose, commit, observe); not compared.
    """

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    ngram_accepted: int
    gamma: int
    sources: tuple[str, ...] = ()
    text: str = ""
    chars: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def seconds(self) -> float:
        """Seconds of this step: what `Metrics.seconds` adds up."""
        return sum(self.times.values())


@dataclass(frozen=True, slots=True)
class Loop:
    """A place where a text repeats itself.

    Attributes:
        start: the first new token of the repetition (its first copy included).
        size: tokens of the pattern.
        span: tokens of the repetition when it was noticed.
    """

    start: int
    size: int
    span: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one generation (definitions: paper section 4; `Meter`).

    Attributes:
        steps: verify passes.
        draft_passes: extra model passes made only to draft.
        acceptance_rate: α, accepted draft tokens ÷ (γ × steps).
        ngram_acceptance_rate: β, the same for tokens accepted on n-gram branches.
        mean_acceptance_length: tokens per step, the target's own included.
        node_acceptance_rate: accepted ÷ drafted tree nodes (what other engines call acceptance
            rate).
        tokens_per_second: new tokens ÷ seconds, prefill not counted.
        seconds: decoding time without the prefill.
        prefill_seconds: time of the prompt's prefill.
        distinct: Distinct-1..4 of the output, unique n-grams ÷ n-grams.
        phases: seconds by phase of the loop (draft, verify, choose, commit, observe).
        loop: the first place where the text repeats itself, None where there is none.
    """

    steps: int
    draft_passes: int
    acceptance_rate: float
    ngram_acceptance_rate: float
    mean_acceptance_length: float
    node_acceptance_rate: float
    tokens_per_second: float
    seconds: float
    prefill_seconds: float
    distinct: tuple[float, float, float, float]
    phases: dict[str, float] = field(default_factory=dict)
    loop: Loop | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``LLM.generate``.

    Attributes:
        token_ids: new tokens only.
        text: their text (without the stop string that ended it).
        finish_reason: "length", "eos", "stop" or "loop"; "cancelled" where a scheduler's ticket
            was.
        metrics: figures of the run.
        prompt_tokens: length of the prompt in tokens.
        lossless: False when the published acceptance rule was used.
        drafting: the report of adaptive drafting, see `Control.record`; None for other strategies.
        heads: ``kind`` and ``file`` of the draft heads; None without heads.
        draft_source: what the strategy could draft from: "heads", "partial passes", "text", "draft
            model NAME", several of them with commas, or "none".
        token_sources: number of new tokens by source, see :data:`SOURCES`.
        logprobs: of each new token, where they were asked for; else [].
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: Metrics
    prompt_tokens: int
    lossless: bool = True
    drafting: dict[str, Any] | None = None
    heads: dict[str, str] | None = None
    draft_source: str = "none"
    token_sources: dict[str, int] = field(default_factory=dict)
    logprobs: list[Logprob] = field(default_factory=list)


PREFILL = "prefill"


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n (Li et al. 2016): unique n-grams ÷ all n-grams; 0 when there is none."""
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return len(set(zip(*(tokens[i : i + total] for i in range(n)), strict=True))) / total


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class _Phase:
    """A stopwatch that adds up, also when the block raises."""

    __slots__ = ("seconds", "_since")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._since


class Meter:
    """Counts steps and adds up times of one generation.

    Definitions (paper, section 4.1): α is accepted draft tokens ÷ the sum of γ over the steps; β
        the same for
    tokens accepted on n-gram branches; the acceptance length is new tokens ÷ steps, the target's
    own included. A figure whose denominator is 0 is 0.

    Times are wall-clock seconds. On an accelerator, a phase that waits for the device (the choice
    of tokens) includes the work queued before it, so only the sum is exact.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._phases = defaultdict[str, _Phase](_Phase)
        self._lap: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """A context manager that adds the time of its block to a phase."""
        return self._phases[name]

    def add(self, step: Step) -> None:
        """Count one verify pass."""
        names = ("drafted", "accepted", "ngram_accepted", "gamma")
        self._counts.update({name: getattr(step, name) for name in names}, steps=1)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, prefill included."""
        return {name: phase.seconds for name, phase in self._phases.items()}

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call; phases without time are left out."""
        before, self._lap = self._lap, self.seconds
        spent = {name: now - before.get(name, 0.0) for name, now in self._lap.items()}
        return {name: seconds for name, seconds in spent.items() if seconds}

    def restore(self, steps: Sequence[tuple[int, ...]], seconds: Mapping[str, float]) -> None:
        """Add the steps of an earlier part of the run, in the journal's form
        (`runs.journal.Tokens`), and its seconds by phase."""
        for _, drafted, accepted, ngram_accepted, gamma, _ in steps:
            self.add(Step((), drafted, accepted, ngram_accepted, gamma))
        for name, value in seconds.items():
            self.phase(name).seconds += value

    def finish(
        self, tokens: Sequence[int], draft_passes: int = 0, loop: Loop | None = None
    ) -> Metrics:
        """The figures of the run.

        Args:
            tokens: the new tokens, as handed to the user.
            draft_passes: model passes made only to draft.
            loop: where the text repeats itself.
        """
        phases, counts = self.seconds, self._counts
        prefill = phases.pop(PREFILL, 0.0)
        seconds = sum(phases.values())
        return Metrics(
            steps=counts["steps"],
            draft_passes=draft_passes,
            acceptance_rate=_ratio(counts["accepted"], counts["gamma"]),
            ngram_acceptance_rate=_ratio(counts["ngram_accepted"], counts["gamma"]),
            mean_acceptance_length=_ratio(len(tokens), counts["steps"]),
            node_acceptance_rate=_ratio(counts["accepted"], counts["drafted"]),
            tokens_per_second=_ratio(len(tokens), seconds),
            seconds=seconds,
            prefill_seconds=prefill,
            distinct=(
                distinct(tokens, 1),
                distinct(tokens, 2),
                distinct(tokens, 3),
                distinct(tokens, 4),
            ),
            phases=phases,
            loop=loop,
        )


# ---- checks of single values ---------------------------------------------------------------------

#: the greatest integer that a field takes: what a tensor's size and index can be
LARGEST = 2**63 - 1
_SHOWN = 80  # characters of a bad value in a message


def shown(value: object) -> str:
    """``repr`` of a bad value, cut to one short piece of a line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def check_integer(
    name: str, value: object, least: int, valid: str = "", most: int = LARGEST
) -> int:
    """The integer, numpy's and torch's as Python's own.

    Raises:
        InputError: unless ``value`` is an integer from ``least`` to ``most``.
    """
    number = integer_of(value)
    if number is None or not least <= number <= most:
        usual = f"of at least {least}" if most == LARGEST else f"from {least} to {most:,}"
        raise InputError(f"{name} is {shown(value)}; valid: {valid or f'an integer {usual}'}", name)
    return number


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise :class:`InputError` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(
            f"{name} is {shown(value)}; valid: {', '.join(choices)}{meant(value, choices)}", name
        )


def meant(given: object, words: Iterable[str]) -> str:
    """What a refusal ends with: the word that was probably meant, if any."""
    named = {word.lstrip("-"): word for word in words}
    begun = given.lower().lstrip("-") if isinstance(given, str) else ""
    found = [name for name in named if len(begun) > 2 and name.startswith(begun)]
    found = found or get_close_matches(begun, named, n=1)
    return f"; did you mean {named[found[0]]}?" if found and found[0] != begun else ""


def check_tokens(tokens: Collection[int], count: int) -> None:
    """Raise :class:`InputError` unless all token ids are below ``count`` and none is negative."""
    if tokens and (min(tokens) < 0 or max(tokens) >= count):
        wrong = next(token for token in tokens if not 0 <= token < count)
        raise InputError(f"token id is {wrong}; valid: 0 to {count - 1}, the model's vocabulary")


def check_flag(name: str, value: object) -> bool:
    """The truth value, numpy's as Python's own; :class:`InputError` for anything else."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise InputError(f"{name} is {shown(value)}; valid: True, False", name)
    return bool(value)


def check_callback(name: str, value: object) -> None:
    """Refuse what cannot be called; None passes."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {shown(value)}; valid: None, or a function", name)


def integer_of(value: object) -> int | None:
    """An integer of Python, numpy or torch as Python's own; None for anything else, truth values
    too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def finite(value: object) -> float:
    """The value as a float for range checks; NaN (which fails every check) when it is no such
    number."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan


def check_text(name: str, text: str) -> str:
    """The text.

    Raises:
        InputError: it holds a lone surrogate, half a character that no UTF-8 has.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        raise InputError(
            f"{name} holds a lone surrogate (character {error.start}, {found}); valid: whole "
            f"characters",
            name,
        ) from error
    return text


def depth_and_size(value: object, most: int) -> tuple[int, int]:
    """How deep objects and lists of a JSON value lie in each other (counted to one more than
    ``most``), and how many values it has down to there."""
    level, depth, count = [value] if isinstance(value, dict | list) else [], 0, 1
    while level and depth <= most:
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        count += sum(map(len, inner))
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        depth += 1
    return depth, count


def keep_field(options: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is made."""
    object.__setattr__(options, name, value)


def counted(number: int, word: str, several: str | None = None) -> str:
    """A count in words: ``1 token``, ``2,000 tokens``.

    Args:
        word: of one.
        several: of any other number; default: with an s.
    """
    return f"{number:,} {word if number == 1 else several or word + 's'}"
