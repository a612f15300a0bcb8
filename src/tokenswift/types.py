"""The nouns of the library, and the legend of shape letters.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
        prompt_logprobs: of each token of the prompt, in the first step, where they were asked for;
            None for the first token, which nothing predicts.
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
    prompt_logprobs: tuple[Logprob | None, ...] = ()
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
        size: tokens of the pattern; of pages that are written again with changes, the median
            distance to what they repeat.
        span: tokens of the repetition when it was noticed.
    """

    start: int
    size: int
    span: int


@dataclass(frozen=True, slots=True)
class Litany:
    """A place where a text goes on in one form, with few new words.

    Attributes:
        start: the first new token of the words in which it was noticed.
        span: tokens from there to where it was noticed.
        opening: how its sentences begin, two words in small letters.
    """

    start: int
    span: int
    opening: str


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
        litany: the first place where it goes on in one form with few new words, None where there is
            none.
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
    litany: Litany | None = None


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
        prompt_logprobs: of each token of the prompt, None for the first, where they were asked for;
            else []. They are the model's own: before penalties, temperature and filters.
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
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n (Li et al. 2016): unique n-grams ÷ all n-grams; 0 when there is none."""
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return len(set(zip(*(tokens[i : i + total] for i in range(n)), strict=True))) / total
