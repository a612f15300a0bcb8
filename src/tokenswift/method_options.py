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


def _widths() -> Any:
    return option((1, 3, 3, 3), "candidates per level, integers of at least 1", "W,W,…")


def _cache() -> Any:
    return option("dynamic", "KV cache of drafting: dynamic, partial (selected once) or full", "NAME")


def _draft() -> Any:
    text = "what heads draft from: partial (a pass over the partial cache), hidden (no extra pass) or auto"
    return option("auto", text, "NAME")


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

    ngrams: int | None = option(None, "0 drafts no repeats of earlier text", "K")
    budget: int | None = option(None, "tokens in the partial KV cache, more than sinks", "B")
    sinks: int = _sinks()
    cache: Cache = _cache()
    candidates: Candidates = _coupled()
    draft: Draft = _draft()
    vocabulary: Vocabulary = _vocabulary()
    draft_model: Any = _draft_model("; adaptive drafting: one more source of drafts")
    explain: Any = option(None, "write a line of JSON for each drafting decision", "FILE")

    def __post_init__(self) -> None:
        if self.ngrams is not None:
            check_ngrams(self)
        check_drafting(self, self.budget is not None)


@named_errors
@dataclass(frozen=True, slots=True)
class TokenSwiftOptions:
    """Options of ``tokenswift``, the paper's method; the defaults are the paper's. Each field says what it
    means."""

    tree: tuple[int, ...] = _widths()
    ngrams: int = option(20, "n-gram branches beside the tree; 0: none", "K")
    ngram_count: int = option(1, "draft n-grams seen this often, at least 1")
    budget: int = _budget(4096)
    sinks: int = _sinks()
    cache: Cache = _cache()
    candidates: Candidates = _coupled()
    draft: Draft = _draft()
    vocabulary: Vocabulary = _vocabulary()
    acceptance: Acceptance = _acceptance()

    def __post_init__(self) -> None:
        check_widths(self)
        check_ngrams(self)
        check_whole(self, "ngram_count", 1)
        check_drafting(self, True)
        check_choice("acceptance", self.acceptance, words(Acceptance))


@named_errors
@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of the ``medusa`` strategy."""

    tree: tuple[int, ...] = _widths()
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


#: kinds of draft heads; as ``heads`` each names the shipped ones of its kind
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


def check_strategy(name: object) -> None:
    """Raise :class:`InputError` unless a strategy has this name."""
    if isinstance(name, str) and name.lower().startswith("eagle"):
        raise InputError(
            f"strategy is {name!r}; valid: auto, with an EAGLE-3 drafter (--eagle PATH, in Python "
            "LLM(eagle=PATH))",
            "strategy",
        )
    check_choice("strategy", name, tuple(OPTIONS))


def check_widths(options: Any) -> None:
    """Check ``options.tree`` and make it a tuple."""
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


def check_ngrams(options: Any) -> None:
    """Check the number of n-gram branches."""
    check_whole(options, "ngrams", 0, most=MAX_NODES // 4)  # four tokens each


def check_drafting(options: Any, sized: bool) -> None:
    """Check what heads and a partial cache draft with; ``sized``: the cache's size is given."""
    check_whole(options, "sinks", 0)
    if sized:
        check_budget(options, "budget")
    check_choice("cache", options.cache, words(Cache))
    check_choice("candidates", options.candidates, words(Candidates))
    check_choice("draft", options.draft, words(Draft))
    check_choice("vocabulary", options.vocabulary, words(Vocabulary))


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


def names_of(strategy: str) -> list[str]:
    """The names of a strategy's options."""
    return [f.name for f in fields(OPTIONS[strategy])]


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
    known = names_of(strategy)
    for name in values or {}:
        if name not in known:
            valid = ", ".join(known) or "none"
            valid += meant(name, known)
            having = [other for other in OPTIONS if name in names_of(other)]
            owners = f" (strategy {' or '.join(having)} has it)" if having else ""
            raise InputError(f"{shown(name)} is not an option of strategy {strategy}; valid: {valid}{owners}")
    return kind(**(values or {}))
