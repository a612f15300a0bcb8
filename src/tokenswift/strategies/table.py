"""The strategies by name: what each is, what it needs, its options, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from tokenswift.config import OPTIONS, MagicDecOptions, MedusaOptions, TokenSwiftOptions, TriForceOptions
from tokenswift.drafters.costs import Table
from tokenswift.drafters.registry import others
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Strategy
from tokenswift.memory import Planned
from tokenswift.sampling.choice import Sampler
from tokenswift.strategies.about import ABOUT
from tokenswift.strategies.autoregressive import Autoregressive
from tokenswift.strategies.magicdec import MagicDec
from tokenswift.strategies.medusa import Medusa
from tokenswift.strategies.tokenswift import AutoTokenSwift, TokenSwift
from tokenswift.strategies.triforce import TriForce
from tokenswift.types import InputError

#: what is not given where trees are fixed: the paper's setting
FIXED: dict[str, Any] = {"tree": (1, 3, 3, 3), "ngrams": 20, "ngram_count": 1, "budget": 4096}
#: tokens of the partial cache in automatic drafting: smaller passes pay earlier
AUTO_BUDGET = 1024


class Resources(Protocol):
    """What builders take from the ``LLM``."""

    target: Any
    heads: Heads | None

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind, if there are any for this model."""
        ...

    def costs(self) -> Table:
        """Measured times of passes."""
        ...

    def draft_name(self, wanted: Any) -> str:
        """The name of a draft model."""
        ...

    def draft_model(self, wanted: Any) -> DraftModel:
        """A draft model by name, or the one that goes with the default model; InputError if none fits."""
        ...


class Planning(Strategy, Planned, Protocol):
    """A strategy that tells ahead of a run what memory it will hold."""


class Entry(NamedTuple):
    """A strategy.

    Attributes:
        options: dataclass of its options.
        build: makes it from resources, options and the choice rule.
        summary, needs, paper: one line each, for the list of strategies.
    """

    options: type
    build: Callable[[Resources, Any, Sampler], Planning]
    summary: str
    needs: str
    paper: str


def filled(options: Any) -> Any:
    """The options with every None of :data:`FIXED` filled in."""
    missing = {k: v for k, v in FIXED.items() if hasattr(options, k) and getattr(options, k) is None}
    return replace(options, **missing)


def _tokenswift(llm: Resources, options: TokenSwiftOptions, sampler: Sampler) -> Planning:
    if options.tree is None and options.acceptance == "exact":  # published: by its tree
        if options.budget is None:
            options = replace(options, budget=max(AUTO_BUDGET, options.sinks + 1))
        guest = None if options.draft_model is None else llm.draft_model(options.draft_model)
        return AutoTokenSwift(options, llm.target, llm.heads, sampler, llm.costs, guest, _frequent(llm))
    return TokenSwift(filled(options), llm.target, llm.heads, sampler)


def _medusa(llm: Resources, options: MedusaOptions, sampler: Sampler) -> Planning:
    heads = llm.heads_of("medusa")
    if heads is None:
        raise InputError(
            "strategy medusa needs heads of kind medusa for this model; valid: --heads FILE from "
            "tokenswift train-heads --kind medusa or import-heads"
        )
    return Medusa(filled(options), llm.target, heads, sampler)


def drafts_from(llm: Resources, strategy: str, options: Any) -> tuple[Heads | None, str]:
    """The heads that a strategy has at hand, and what it may draft from, in the words of
    `types.Generation.draft_source`."""
    if strategy == "tokenswift":
        heads = llm.heads
        partial = options.draft != "hidden" and (options.draft == "partial" or options.cache != "full")
        parts = {"heads": heads is not None, "partial passes": partial, "text": options.ngrams != 0}
        if options.draft_model is not None:
            parts[f"draft model {llm.draft_name(options.draft_model)}"] = True
        if options.tree is None and options.acceptance == "exact":
            parts |= dict.fromkeys((drafter.mark.title for drafter in others()), True)
        return heads, ", ".join(name for name, there in parts.items() if there) or "none"
    if strategy == "medusa":
        return llm.heads_of("medusa"), "heads"
    if strategy == "triforce" or (strategy == "magicdec" and options.draft_model is not None):
        return None, f"draft model {llm.draft_name(options.draft_model)}"
    return None, "partial passes" if strategy == "magicdec" else "none"


def _frequent(llm: Resources) -> Any:
    return None if llm.heads is None else llm.heads.frequent


def _magicdec(llm: Resources, options: MagicDecOptions, sampler: Sampler) -> Planning:
    draft = None if options.draft_model is None else llm.draft_model(options.draft_model)
    return MagicDec(options, llm.target, draft, sampler, _frequent(llm))


def _triforce(llm: Resources, options: TriForceOptions, sampler: Sampler) -> Planning:
    return TriForce(options, llm.target, llm.draft_model(options.draft_model), sampler, _frequent(llm))


_BUILDERS: dict[str, Callable[[Resources, Any, Sampler], Planning]] = {
    "autoregressive": lambda llm, options, sampler: Autoregressive(),
    "tokenswift": _tokenswift,
    "medusa": _medusa,
    "triforce": _triforce,
    "magicdec": _magicdec,
}
STRATEGIES: dict[str, Entry] = {
    name: Entry(OPTIONS[name], build, *ABOUT[name]) for name, build in _BUILDERS.items()
}
