"""What each method takes, and words for how a loop is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from tokenswift.checks import LARGEST, integer_of, keep_field, meant, shown
from tokenswift.config.fields import AtLeast, Between, Option, check_fields, refuse
from tokenswift.types import InputError

MAX_NODES = 4096  # of a tree, its root included

# words that arguments take: editors complete them, and checks take the valid ones from them

#: how to draft; it never changes the tokens
Strategy: TypeAlias = Literal[
    "auto", "autoregressive", "tokenswift", "medusa", "triforce", "magicdec"
]

#: what a text does that repeats itself: it goes on, ends at copies and at litanies, or at copies
OnLoop: TypeAlias = Literal["report", "stop", "copies"]

Cache: TypeAlias = Literal["full", "partial", "dynamic"]
Candidates: TypeAlias = Literal["coupled", "probability"]
Draft: TypeAlias = Literal["auto", "partial", "hidden"]
Vocabulary: TypeAlias = Literal["frequent", "full"]
Acceptance: TypeAlias = Literal["exact", "published"]
Kv: TypeAlias = Literal["snapkv", "streaming"]


def parse_widths(text: str) -> tuple[int, ...] | None:
    """Candidates per level as the command line has them: ``1,3,3,3``, or "auto" (→ None).

    Raises:
        ValueError: it is something else.
    """
    return None if text == "auto" else tuple(int(width) for width in text.split(","))


WIDTHS_OPTION = Option(
    "N,N,…", read=parse_widths, valid="auto, or integers of at least 1, such as 1,3,3,3"
)
NGRAMS = Between(0, MAX_NODES // 4)  # each may add 4 nodes
GAMMA = Between(1, 32)  # each of these tokens takes a pass or more


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options of a decoding method; each has those that it names, plain decoding none.

    Attributes:
        tree: auto, or candidates per level, integers of at least 1
        ngrams: n-gram branches next to the tree; 0: no repeats of earlier text are drafted
        ngram_count: draft n-grams seen this often, at least 1
        budget: tokens in the partial KV cache, more than sinks
        sinks: first tokens that partial caches always hold, 0 or more
        cache: KV cache of drafting: dynamic, partial (selected once) or full
        candidates: ranked coupled (with the target's own noise) or by probability
        draft: what heads draft from: partial (a pass over the partial cache), hidden (no extra
            pass) or auto
        vocabulary: tokens that can be drafted: frequent (and the prompt's) or full
        acceptance: acceptance rule: exact, or published (the paper's: NOT lossless, the text
            differs)
        draft_model: causal LM with the target's tokenizer: alias, folder or hub id; default: none,
            or for triforce and the default model the shipped one
        gamma: tokens of a drafted chain, 1 to 32
        kv: sparse cache: snapkv (pooled attention at prefill) or streaming
        inner_gamma: tokens the draft model drafts for the partial cache, 1 to 32
        chunk: tokens of a retrieved chunk, at least 1
        refresh: new tokens after which retrieval is repeated; 0: only at prefill
        draft_budget: tokens in the draft model's KV cache, more than sinks
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if hasattr(self, "tree"):
            check_widths(self)
        sinks: int = getattr(self, "sinks", 0)
        for name in ("budget", "draft_budget"):
            size: int | None = getattr(self, name, None)
            if size is not None and size <= sinks:
                refuse(self, name, f"; valid: more than the {sinks} sink tokens")


@dataclass(frozen=True, slots=True)
class AutoOptions(MethodOptions):
    """Options of ``auto``, adaptive drafting; None chooses by device. See `MethodOptions`."""

    ngrams: Annotated[int | None, NGRAMS] = None
    budget: int | None = None
    sinks: Annotated[int, AtLeast(0)] = 16
    cache: Cache = "dynamic"
    candidates: Candidates = "coupled"
    draft: Draft = "auto"
    vocabulary: Vocabulary = "frequent"
    draft_model: Any = None


@dataclass(frozen=True, slots=True)
class TokenSwiftOptions(MethodOptions):
    """Options of ``tokenswift``, the paper's method; the defaults are the paper's. See
    `MethodOptions`."""

    tree: Annotated[tuple[int, ...], WIDTHS_OPTION] = (1, 3, 3, 3)
    ngrams: Annotated[int, NGRAMS] = 20
    ngram_count: int = 1
    budget: int = 4096
    sinks: Annotated[int, AtLeast(0)] = 16
    cache: Cache = "dynamic"
    candidates: Candidates = "coupled"
    draft: Draft = "auto"
    vocabulary: Vocabulary = "frequent"
    acceptance: Acceptance = "exact"


@dataclass(frozen=True, slots=True)
class MedusaOptions(MethodOptions):
    """Options of the ``medusa`` strategy. See `MethodOptions`."""

    tree: Annotated[tuple[int, ...], WIDTHS_OPTION] = (1, 3, 3, 3)
    candidates: Candidates = "coupled"
    acceptance: Acceptance = "exact"
    vocabulary: Vocabulary = "frequent"


@dataclass(frozen=True, slots=True)
class MagicDecOptions(MethodOptions):
    """Options of the ``magicdec`` strategy; without a draft model the target drafts for itself. See
    `MethodOptions`."""

    gamma: Annotated[int, GAMMA] = 3
    kv: Kv = "snapkv"
    budget: int = 4096
    sinks: Annotated[int, AtLeast(0)] = 16
    draft_model: Any = None
    candidates: Candidates = "coupled"


@dataclass(frozen=True, slots=True)
class TriForceOptions(MethodOptions):
    """Options of the ``triforce`` strategy. See `MethodOptions`."""

    gamma: Annotated[int, GAMMA] = 6
    inner_gamma: Annotated[int, GAMMA] = 2
    budget: int = 4096
    sinks: Annotated[int, AtLeast(0)] = 16
    chunk: int = 8
    refresh: Annotated[int, AtLeast(0)] = 64
    draft_model: Any = None
    draft_budget: int = 256
    candidates: Candidates = "coupled"


#: strategy → kind of its options
OPTIONS: dict[str, type[MethodOptions]] = {
    "auto": AutoOptions,
    "autoregressive": MethodOptions,
    "tokenswift": TokenSwiftOptions,
    "medusa": MedusaOptions,
    "triforce": TriForceOptions,
    "magicdec": MagicDecOptions,
}


def check_widths(options: MethodOptions) -> None:
    """Check the field ``tree`` and make it a tuple."""
    widths: object = getattr(options, "tree", None)
    tree = tuple(
        integer_of(width) or 0 for width in (widths if isinstance(widths, tuple | list) else ())
    )
    if not tree or not all(0 < width <= LARGEST for width in tree):
        text = ",".join(map(str, widths)) if isinstance(widths, tuple | list) else widths
        valid = "integers of at least 1, such as 1,3,3,3"
        raise InputError(f"tree is {shown(text)}; valid: {valid}", "tree")
    if len(tree) > MAX_NODES or tree_nodes(tree) > MAX_NODES:
        text = shown(",".join(map(str, tree)))
        raise InputError(
            f"tree is {text}; valid: at most {MAX_NODES} nodes in all, the root included", "tree"
        )
    keep_field(options, "tree", tree)


def tree_nodes(widths: Sequence[int]) -> int:
    """Nodes of the full product of these widths, the root included."""
    level_nodes = 1
    nodes = 1
    for width in widths:
        level_nodes *= width
        nodes += level_nodes
    return nodes


def names_of(strategy: str) -> list[str]:
    """The names of a strategy's options."""
    return [field.name for field in fields(OPTIONS[strategy])]


def build_options(strategy: str, values: Mapping[str, Any] | None) -> Any:
    """Make a strategy's options.

    Args:
        values: names and values; None for the defaults.
    Raises:
        InputError: an unknown name, or a bad value.
    """
    if values is not None and not isinstance(values, Mapping):
        valid = f"a dict of options of strategy {strategy}"
        raise InputError(f"strategy_options is {shown(values)}; valid: {valid}")
    known = names_of(strategy)
    name = next((name for name in values or {} if name not in known), None)
    if name is not None:
        having = [other for other in OPTIONS if name in names_of(other)]
        owners = f" (strategy {' or '.join(having)} has it)" if having else ""
        valid = f"{', '.join(known) or 'none'}{meant(name, known)}{owners}"
        raise InputError(f"{shown(name)} is not an option of strategy {strategy}; valid: {valid}")
    return OPTIONS[strategy](**(values or {}))
