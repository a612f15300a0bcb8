"""The strategies by name: what each is, what it needs, its options, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from tokenswift.config import OPTIONS, MagicDecOptions, MedusaOptions, TokenSwiftOptions, TriForceOptions
from tokenswift.drafting.costs import Table
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Strategy
from tokenswift.memory import Planned
from tokenswift.sampling import Sampler
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
    if options.tree is None and options.acceptance == "exact":  # the published rule's law is its tree's
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


def _frequent(llm: Resources) -> Any:
    return None if llm.heads is None else llm.heads.frequent


def _magicdec(llm: Resources, options: MagicDecOptions, sampler: Sampler) -> Planning:
    draft = None if options.draft_model is None else llm.draft_model(options.draft_model)
    return MagicDec(options, llm.target, draft, sampler, _frequent(llm))


def _triforce(llm: Resources, options: TriForceOptions, sampler: Sampler) -> Planning:
    return TriForce(options, llm.target, llm.draft_model(options.draft_model), sampler, _frequent(llm))


STRATEGIES: dict[str, Entry] = {
    "autoregressive": Entry(
        OPTIONS["autoregressive"],
        lambda llm, options, sampler: Autoregressive(),
        "plain decoding: one token a pass; the baseline of every ratio",
        "nothing",
        "none",
    ),
    "tokenswift": Entry(
        OPTIONS["tokenswift"],
        _tokenswift,
        "draft heads over a dynamic partial KV cache, n-grams of the text, tree verification",
        "draft heads (shipped for the default model); works without them, slower",
        "Wu et al. 2025, TokenSwift, arXiv 2502.18890",
    ),
    "medusa": Entry(
        OPTIONS["medusa"],
        _medusa,
        "parallel residual-block heads on the last verified hidden state, tree over the full cache",
        "heads of kind medusa (shipped for the default model)",
        "Cai et al. 2024, Medusa, arXiv 2401.10774",
    ),
    "triforce": Entry(
        OPTIONS["triforce"],
        _triforce,
        "a small model drafts for the target over retrieved chunks, which drafts for the full cache",
        "a draft model with the target's tokenizer (shipped for the default model)",
        "Sun et al. 2024, TriForce, arXiv 2404.11912",
    ),
    "magicdec": Entry(
        OPTIONS["magicdec"],
        _magicdec,
        "a chain drafted over a sparse KV cache by the target itself, or by a small model",
        "nothing; a draft model for the standalone form",
        "Chen et al. 2024, MagicDec, arXiv 2408.11049",
    ),
}
