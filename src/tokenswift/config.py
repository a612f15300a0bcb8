"""Options as frozen dataclasses: every field checked, every error names the field and the value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tokenswift.checks import (
    LARGEST,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    finite,
    integer_of,
    meant,
    named_errors,
    shown,
)
from tokenswift.types import InputError
from tokenswift.words import (
    Acceptance,
    Cache,
    Candidates,
    Draft,
    DraftWeights,
    HeadKind,
    Kv,
    OnLoop,
    Vocabulary,
    words,
)

if TYPE_CHECKING:  # the command line reads options without it
    pass

T = TypeVar("T")
API_KEY = "TOKENSWIFT_API_KEY"


def _keep(options: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is made."""
    object.__setattr__(options, name, value)


def _whole(options: object, name: str, least: int, valid: str | None = None, most: int = LARGEST) -> None:
    """Check an integer field; it becomes Python's own integer."""
    if most < LARGEST:
        valid = f"an integer from {least} to {most:,}"
    number = check_integer(name, getattr(options, name), least, valid)
    if number > most:
        raise InputError(f"{name} is {shown(number)}; valid: {valid}", name)
    _keep(options, name, number)


def environment_key() -> str | None:
    """The key that clients of a server have to show, by the environment; None where it is not set."""
    return os.environ.get(API_KEY) or None


def check_threads(value: object) -> int:
    """A number of CPU threads: from 1 to four for each core, and up to 16 on any machine.

    Raises:
        InputError: another value.
    """
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)
    threads = integer_of(value)
    if threads is None or not 1 <= threads <= most:
        valid = f"1 to {most} (this machine has {cores} cores)"
        raise InputError(f"threads is {shown(value)}; valid: {valid}", "threads")
    return threads


@named_errors
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table 10).

    Attributes:
        temperature: logits are divided by it, from 1e-30 to 1e30; 0 is greedy decoding
        top_k: keep the k likeliest tokens; 0 keeps all
        top_p: in (0, 1]: keep the smallest set of tokens with this probability; 1 keeps all
        min_p: in [0, 1): drop tokens less likely than this share of the best; 0 keeps all
        eta_cutoff: in [0, 1): epsilon of eta sampling; 0 is off
        repetition_penalty: theta, from 1 to 1e30: penalty of tokens in the window; 1 is off
        penalty_window: W, at least 1: newest tokens that the penalty looks at
        seed: 0 or more: same seed, same text, whatever the strategy; the noise is a pure function of it, the
            position and the token
        greedy: take the likeliest token, after the penalty; no noise, and no filter, whatever else is given
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.1
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.2
    penalty_window: int = 1024
    seed: int = 0
    greedy: bool = False

    def __post_init__(self) -> None:
        about = "0 (greedy decoding), or from 1e-30 to 1e30"
        for name, valid, fits in (
            ("temperature", about, lambda t: t == 0 or 1e-30 <= t <= 1e30),
            ("top_p", "in (0, 1]", lambda p: 0 < p <= 1),
            ("min_p", "in [0, 1)", lambda p: 0 <= p < 1),
            ("eta_cutoff", "in [0, 1)", lambda p: 0 <= p < 1),
            ("repetition_penalty", "at least 1 (1 is off), at most 1e30", lambda r: 1 <= r <= 1e30),
        ):
            value = getattr(self, name)
            _keep(self, name, check_number(name, value, valid, fits(finite(value))))
        _whole(self, "top_k", 0, "an integer of at least 1, or 0 for all tokens")
        _whole(self, "penalty_window", 1)
        _whole(self, "seed", 0, "an integer from 0 to 2^63 - 1")
        _keep(self, "greedy", check_flag("greedy", self.greedy))
        if self.temperature == 0:  # one way to say it: nothing divides by zero, and equal settings are equal
            _keep(self, "greedy", True)
            _keep(self, "temperature", 1.0)

    @property
    def window(self) -> int:
        """The penalty window in tokens; 0 when the penalty is off."""
        return self.penalty_window if self.repetition_penalty != 1.0 else 0


#: sampling without any filter or penalty
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
}
#: of answers, where no sampling is given and the model names none: a penalty would break what has to be
#: repeated, such as JSON, code and names
ANSWERS = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.0)


def sampling_over(usual: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """A sampling with the given fields over it.

    Raises:
        InputError: one of them is out of its range.
    """
    return replace(usual, **_warm(given))


def sampling_by(named: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The sampling that a model names, the given fields over it; what neither names is off.

    Raises:
        InputError: a field is out of its range.
    """
    return SamplingParams(**{**NEUTRAL, **named, **_warm(given)})


def _warm(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields; whoever gives a temperature wants no greedy decoding, whatever is usual."""
    return {"greedy": False, **given} if given.get("temperature") else dict(given)


MAX_NODES = 4096  # of a tree, its root included
MAX_GAMMA = 32  # tokens of a drafted chain, each of which takes a pass or more
ON_LOOP = words(OnLoop)
MOST_PATTERN = 65_536  # tokens of a repeated pattern


@named_errors
@dataclass(frozen=True, slots=True)
class LoopOptions:
    """When a text counts as looping.

    Attributes:
        min_pattern_size, max_pattern_size: tokens of a pattern.
        min_count: copies of it, at least 2.
        min_tokens: tokens that the copies make up together.
    """

    min_pattern_size: int = 1
    max_pattern_size: int = 512
    min_count: int = 3
    min_tokens: int = 160

    def __post_init__(self) -> None:
        for name in ("min_pattern_size", "max_pattern_size", "min_tokens"):
            _whole(self, name, 1)
        _whole(self, "min_count", 2)
        if not self.min_pattern_size <= self.max_pattern_size <= MOST_PATTERN:
            raise InputError(
                f"max_pattern_size is {self.max_pattern_size}; valid: {self.min_pattern_size} "
                f"(min_pattern_size) to {MOST_PATTERN}"
            )

    @property
    def reach(self) -> int:
        """Tokens that decide whether the next one ends a loop."""
        return self.max_pattern_size + max(self.min_tokens, self.max_pattern_size * self.min_count)


def option(default: Any, text: str, metavar: str = "N") -> Any:
    """A field of a strategy's options: its default, what it means and the placeholder of its value.

    The command line and the list of strategies are made from these.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar})


def _widths(default: Any = None) -> Any:
    return option(default, "candidates per level, integers of at least 1, such as 1,3,3,3", "W,W,…")


def _coupled() -> Any:
    return option("coupled", "ranked coupled (with the target's own noise) or by probability", "NAME")


def _acceptance() -> Any:
    return option(
        "exact", "acceptance rule: exact, or published (the paper's: NOT lossless, the text differs)", "NAME"
    )


def _vocabulary() -> Any:
    return option("frequent", "tokens that can be drafted: frequent (and the prompt's) or full", "NAME")


def _budget(default: int) -> Any:
    return option(default, "tokens in the partial KV cache, more than sinks", "B")


def _sinks() -> Any:
    return option(16, "first tokens that partial caches always hold, 0 or more")


def _gamma(default: int) -> Any:
    return option(default, f"tokens of a drafted chain, 1 to {MAX_GAMMA}")


def _draft_model(text: str) -> Any:
    return option(None, f"causal LM with the target's tokenizer: alias, folder or hub id{text}", "M")


def _draft_budget() -> Any:
    return option(256, "tokens in the draft model's KV cache, more than sinks", "B")


@named_errors
@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a strategy that has none."""


@named_errors
@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``, adaptive drafting; None chooses by device. Each field says what it means."""

    ngrams: int | None = option(
        None, "n-gram branches of a fixed tree; 0: neither these nor long matches", "K"
    )
    budget: int | None = option(None, "tokens in the partial KV cache, more than sinks", "B")
    sinks: int = _sinks()
    cache: Cache = option("dynamic", "KV cache of drafting: dynamic, partial (selected once) or full", "NAME")
    candidates: Candidates = _coupled()
    draft: Draft = option(
        "auto",
        "what heads draft from: partial (a pass over the partial cache), hidden (no extra pass) or auto",
        "NAME",
    )
    draft_weights: DraftWeights = option(
        "auto",
        "weights the model drafts for itself with: auto, quantized to q8_0, q4_1 or q4_0, or none",
        "FORMAT",
    )
    vocabulary: Vocabulary = _vocabulary()
    draft_model: Any = _draft_model("; adaptive drafting: one more source of drafts")
    explain: Any = option(None, "adaptive drafting: write a line of JSON for each decision", "FILE")

    def __post_init__(self) -> None:
        if self.ngrams is not None:
            _whole(self, "ngrams", 0, most=MAX_NODES // 4)  # four tokens each
        _whole(self, "sinks", 0)
        if self.budget is not None:
            check_budget(self, "budget")
        check_choice("cache", self.cache, words(Cache))
        check_choice("candidates", self.candidates, words(Candidates))
        check_choice("draft", self.draft, words(Draft))
        check_choice("draft_weights", self.draft_weights, words(DraftWeights))
        check_choice("vocabulary", self.vocabulary, words(Vocabulary))


@named_errors
@dataclass(frozen=True, slots=True)
class TokenSwiftOptions(AutoOptions):
    """Options of the ``tokenswift`` strategy. Without a tree, and with the exact rule, they are options of
    ``auto``: what ``tokenswift`` ran before that had a name of its own (see `settled`)."""

    tree: tuple[int, ...] | None = option(
        None, "candidates per level, such as 1,3,3,3; auto: adaptive drafting", "W,W,…"
    )
    ngram_count: int | None = option(None, "fixed tree: draft n-grams seen this often, at least 1")
    acceptance: Acceptance = _acceptance()

    def __post_init__(self) -> None:
        AutoOptions.__post_init__(self)
        check_widths(self)
        if self.ngram_count is not None:
            _whole(self, "ngram_count", 1)
        check_choice("acceptance", self.acceptance, words(Acceptance))
        if self.draft_model is not None and (self.tree is not None or self.acceptance != "exact"):
            raise InputError(
                "draft_model is given beside a fixed tree; valid: strategy auto, triforce or magicdec"
            )


@named_errors
@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of the ``medusa`` strategy."""

    tree: tuple[int, ...] | None = _widths()
    candidates: Candidates = _coupled()
    acceptance: Acceptance = _acceptance()
    vocabulary: Vocabulary = _vocabulary()

    def __post_init__(self) -> None:
        check_widths(self)
        check_choice("candidates", self.candidates, words(Candidates))
        check_choice("acceptance", self.acceptance, words(Acceptance))
        check_choice("vocabulary", self.vocabulary, words(Vocabulary))


@named_errors
@dataclass(frozen=True, slots=True)
class MagicDecOptions:
    """Options of the ``magicdec`` strategy."""

    gamma: int = _gamma(3)
    kv: Kv = option("snapkv", "sparse cache: snapkv (pooled attention at prefill) or streaming", "NAME")
    budget: int = _budget(4096)
    sinks: int = _sinks()
    draft_model: Any = _draft_model("; none: the target drafts for itself")
    candidates: Candidates = _coupled()

    def __post_init__(self) -> None:
        _whole(self, "gamma", 1, most=MAX_GAMMA)
        check_choice("kv", self.kv, words(Kv))
        check_budget(self, "budget")
        check_choice("candidates", self.candidates, words(Candidates))


@named_errors
@dataclass(frozen=True, slots=True)
class TriForceOptions:
    """Options of the ``triforce`` strategy."""

    gamma: int = _gamma(6)
    inner_gamma: int = option(2, f"tokens the draft model drafts for the partial cache, 1 to {MAX_GAMMA}")
    budget: int = _budget(4096)
    sinks: int = _sinks()
    chunk: int = option(8, "tokens of a retrieved chunk, at least 1")
    refresh: int = option(64, "new tokens after which retrieval is repeated; 0: only at prefill")
    draft_model: Any = _draft_model("; for the default model the shipped one")
    draft_budget: int = _draft_budget()
    candidates: Candidates = _coupled()

    def __post_init__(self) -> None:
        for name in ("gamma", "inner_gamma"):
            _whole(self, name, 1, most=MAX_GAMMA)
        _whole(self, "chunk", 1)
        _whole(self, "refresh", 0)
        check_budget(self, "budget")
        check_budget(self, "draft_budget")
        check_choice("candidates", self.candidates, words(Candidates))


#: kinds of draft heads; as ``spec.heads`` each names the shipped ones of its kind
HEAD_KINDS = words(HeadKind)
#: strategy → kind of its options
OPTIONS: dict[str, type] = {
    "auto": AutoOptions,
    "autoregressive": NoOptions,
    "tokenswift": TokenSwiftOptions,
    "medusa": MedusaOptions,
    "triforce": TriForceOptions,
    "magicdec": MagicDecOptions,
}


def check_widths(options: Any) -> None:
    """Check ``options.tree`` and make it a tuple; None passes."""
    if options.tree is None:
        return
    found = [integer_of(width) for width in options.tree] if isinstance(options.tree, tuple | list) else []
    if not found or any(width is None or not 0 < width <= LARGEST for width in found):
        raise InputError(
            f"tree is {shown(options.tree)}; valid: integers of at least 1, such as 1,3,3,3", "tree"
        )
    tree = tuple(width for width in found if width is not None)
    if len(tree) > MAX_NODES or tree_nodes(tree) > MAX_NODES:
        text = shown(",".join(map(str, tree)))
        raise InputError(
            f"tree is {text}; valid: at most {MAX_NODES} nodes in all, the root included", "tree"
        )
    _keep(options, "tree", tree)


def tree_nodes(widths: Sequence[int]) -> int:
    """Nodes of the full product of these widths, the root included."""
    level, nodes = 1, 1
    for width in widths:
        level *= width
        nodes += level
    return nodes


def check_budget(options: Any, name: str) -> None:
    """Check the size of a partial cache against its sinks."""
    _whole(options, "sinks", 0)
    _whole(options, name, 1)
    if getattr(options, name) <= options.sinks:
        raise InputError(
            f"{name} is {getattr(options, name)}; valid: more than the {options.sinks} sink tokens", name
        )


def build_options(kind: type[T], strategy: str, values: Mapping[str, Any] | T | None) -> T:
    """Make a strategy's options.

    Args:
        kind: dataclass of the strategy's options.
        values: names and values, the dataclass itself, or None for the defaults.
    Raises:
        InputError: an unknown name, a bad value, or options of another strategy.
    """
    if isinstance(values, kind):
        return values
    if values is not None and not isinstance(values, Mapping):
        raise InputError(
            f"strategy_options is {shown(values)}; valid for strategy {strategy}: a dict of its options or "
            f"{kind.__name__}(…)"
        )
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values or {}:
        if name not in known:
            valid = ", ".join(known) or "none"
            valid += meant(name, known)
            raise InputError(f"{shown(name)} is no option of strategy {strategy}; valid: {valid}")
    return kind(**(values or {}))


#: is said once where the strategy that is asked for has another name
RENAMED = "strategy tokenswift without --tree is strategy auto, which runs; the paper's has --tree 1,3,3,3"


def settled(strategy: str, values: Any) -> tuple[str, Any]:
    """A strategy and its options: a fixed tree, or the published rule, makes ``auto`` the paper's method,
    and ``tokenswift`` without either is ``auto``.

    Raises:
        InputError: as :func:`build_options` has it.
    """
    if strategy not in ("auto", "tokenswift"):
        return strategy, build_options(OPTIONS[strategy], strategy, values)
    if type(values) is AutoOptions:
        return "auto", values
    options = build_options(TokenSwiftOptions, strategy, values)
    if options.tree is not None or options.acceptance != "exact":
        return "tokenswift", options
    return "auto", AutoOptions(**{f.name: getattr(options, f.name) for f in fields(AutoOptions)})


def given_options(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options that differ from their defaults."""
    return {f.name: value for f in fields(options) if (value := getattr(options, f.name)) != f.default}
