"""Options of each decoding method (``strategy``), as frozen dataclasses; each field says what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from tokenswift.checks import (
    LARGEST,
    check_choice,
    check_whole,
    integer_of,
    keep_field,
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
    Vocabulary,
    words,
)

T = TypeVar("T")
MAX_NODES = 4096  # of a tree, its root included
MAX_GAMMA = 32  # tokens of a drafted chain, each of which takes a pass or more


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
            check_whole(self, "ngrams", 0, most=MAX_NODES // 4)  # four tokens each
        check_whole(self, "sinks", 0)
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
            check_whole(self, "ngram_count", 1)
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
        check_whole(self, "gamma", 1, most=MAX_GAMMA)
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
            check_whole(self, name, 1, most=MAX_GAMMA)
        check_whole(self, "chunk", 1)
        check_whole(self, "refresh", 0)
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
    keep_field(options, "tree", tree)


def tree_nodes(widths: Sequence[int]) -> int:
    """Nodes of the full product of these widths, the root included."""
    level, nodes = 1, 1
    for width in widths:
        level *= width
        nodes += level
    return nodes


def check_budget(options: Any, name: str) -> None:
    """Check the size of a partial cache against its sinks."""
    check_whole(options, "sinks", 0)
    check_whole(options, name, 1)
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
