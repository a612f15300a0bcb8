"""The strategies by name: the options of each, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenswift.config import (
    AutoOptions,
    MagicDecOptions,
    MedusaOptions,
    TokenSwiftOptions,
    TriForceOptions,
    tree_nodes,
)
from tokenswift.loader.find import rivals_note
from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.adaptive import CHAIN as LONGEST
from tokenswift.spec.adaptive import ByChance
from tokenswift.spec.drafters.base import Candidates, Drafter, Outcome
from tokenswift.spec.drafters.eagle import EagleDrafter
from tokenswift.spec.drafters.heads import DEPTH, HeadDrafter
from tokenswift.spec.drafters.lookup import LENGTH, GrammarDrafter, Ngrams, PromptLookup
from tokenswift.spec.drafters.passes import (
    CheckedDrafter,
    ModelContext,
    ModelDrafter,
    PartialDrafter,
    SparseContext,
)
from tokenswift.spec.drafters.recycle import Recycle
from tokenswift.spec.heads import Heads
from tokenswift.spec.resources import Resources
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import check_tree
from tokenswift.types import DraftTree, InputError, Step


@dataclass(eq=False)
class FixedWidths:
    """Drafting of published methods: as many candidates at every depth, in every step.

    Args:
        drafters: all that may be asked; `asked` says which of them a step asks, in order.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        widths: candidates of a place, by its depth.
        option: what sets the widths, and its value, as errors name them.
        acceptance: the rule, "exact" or "published".
        most: passes at most in which a drafter goes along one path; None: one for each depth.

    Attributes:
        nodes: of the widest tree, the root included, without branches.
        max_nodes: of a tree at most, for the cache's scratch room.
    """

    drafters: Sequence[Drafter]
    sampler: Sampler
    coupled: bool
    widths: tuple[int, ...]
    option: tuple[str, object]
    acceptance: str = "exact"
    most: int | None = None

    def __post_init__(self) -> None:
        self.nodes = self.max_nodes = tree_nodes(self.widths)

    def needs(self, text: int, row: int) -> list[Need]:
        """The tree's rows, and what the drafters hold (see `memory.needs_of`)."""
        own = Need(*self.option, self.nodes * row)
        return [own, *(need for drafter in self.drafters for need in drafter.needs(text, row))]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the drafters read the prompt."""
        for drafter in self.drafters:
            drafter.begin(sequence)

    def asked(self, sequence: TokenSequence) -> Sequence[Drafter]:
        """Who proposes in this step."""
        return self.drafters

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The step's tree, no deeper than tokens are wanted: the last of them is the target's own."""
        widths, left = self.widths, sequence.left
        if left is not None and self.acceptance == "exact":  # by the published rule drafts change tokens
            widths = widths[: max(0, left - 1)]
        candidates = Candidates(sequence, self.sampler, self.coupled, widths, self.most)
        for drafter in self.asked(sequence) if widths else ():
            candidates.ask(drafter)
        sequence.draft_passes += candidates.passes
        tree = candidates.tree
        out = candidates.forbidden(range(1, len(tree)))
        self.tree = tree.build([n for n in range(1, len(tree)) if n not in out] if out else None)
        return self.tree

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Let the drafters read on."""
        tokens = list(step.token_ids)
        for drafter in self.drafters:
            drafter.observe(sequence, Outcome(tokens, len(nodes), True, self.tree))

    def report(self) -> dict[str, Any] | None:
        """Nothing to account for: it drafts what it is told to."""
        return None


def autoregressive(llm: Any, options: Any, sampler: Sampler) -> FixedWidths:
    """One token per pass over the full cache; neither ``llm`` nor ``options`` is looked at."""
    return FixedWidths([], sampler, True, (), ("tree", "1"))


def medusa(llm: Resources, options: MedusaOptions, sampler: Sampler) -> FixedWidths:
    """Medusa's drafting.

    Raises:
        InputError: no heads of kind "medusa", tree widths above the vocabulary, or too many nodes.
    """
    heads, tree = llm.heads_of("medusa"), options.tree
    if heads is None:
        raise InputError(
            "strategy medusa needs heads of kind medusa for this model; valid: --heads FILE from "
            f"tokenswift train --kind medusa{rivals_note()}"
        )
    check_tree(tree, llm.target.vocab_size)
    drafter = HeadDrafter(llm.target, llm.packed(heads), options.vocabulary == "frequent")
    coupled = options.candidates == "coupled"
    return FixedWidths([drafter], sampler, coupled, tree, ("tree", tree), options.acceptance)


class TokenSwift(FixedWidths):
    """The paper's method; without heads its n-grams and passes over the partial cache alone.

    Raises:
        InputError: tree widths above the vocabulary, or too many nodes.
    """

    def __init__(self, llm: Resources, options: TokenSwiftOptions, sampler: Sampler) -> None:
        target, coupled = llm.target, options.candidates == "coupled"
        tree, self.target, self.mode = options.tree, llm.target, options.draft
        check_tree(tree, target.vocab_size)
        self.budget = options.budget
        heads, frequent = llm.heads, options.vocabulary == "frequent"
        self.heads = [] if heads is None else [HeadDrafter(target, llm.packed(heads), frequent)]
        context, frozen = None, options.cache == "partial"
        if options.cache != "full":
            context = SparseContext(target, "important", self.budget, options.sinks, 1, frozen=frozen)
        self.partial = PartialDrafter(target, context, next(iter(self.heads), None), least=self.budget)
        count = options.ngrams
        self.ngrams = [Ngrams(count, options.ngram_count, sampler, coupled)] if count else []
        drafters = [*self.heads, *([] if self.mode == "hidden" else [self.partial]), *self.ngrams]
        super().__init__(drafters, sampler, coupled, tree, ("tree", tree), options.acceptance, most=1)
        self.max_nodes += count * LENGTH

    def asked(self, sequence: TokenSequence) -> list[Drafter]:
        """The paper's Algorithm 1, lines 4 to 7: what drafts the tree, then the n-grams."""
        total = sequence.cache.length
        pays = total > self.budget and total * self.target.kv_bytes > self.target.weight_bytes
        passes = self.mode == "partial" or (self.mode == "auto" and pays)
        if passes and sequence.newest is not None:
            return [self.partial, *self.ngrams]
        return [*self.heads, *self.ngrams]


def small_model(
    llm: Resources,
    name: Any,
    asked: tuple[str, Any],
    size: int,
    sinks: int,
    longest: int,
    kv: str = "streaming",
) -> ModelDrafter:
    """A draft model that drafts up to ``longest`` tokens over a cache of ``size``; ``asked``: the option that
    sets it, and its value."""
    target, model = llm.target, llm.draft_models.get(name)
    frequent = None if llm.heads is None else llm.heads.frequent
    context = ModelContext(model, target.vocab_size, kv, size, sinks, longest, frequent)
    return ModelDrafter(context, target, asked)


def triforce(llm: Resources, options: TriForceOptions, sampler: Sampler) -> FixedWidths:
    """TriForce's drafting: a chain of at least γ tokens.

    Raises:
        InputError: the draft model cannot be had.
    """
    gamma, sinks, longest = options.gamma, options.sinks, options.gamma + options.inner_gamma
    asked = ("draft_budget", options.draft_budget)
    inner = small_model(llm, options.draft_model, asked, options.draft_budget, sinks, longest)
    sizes = (options.budget, sinks, longest + 1, options.refresh)
    context = SparseContext(llm.target, "chunks", *sizes, chunk=options.chunk)
    drafter = CheckedDrafter(context, inner, options.inner_gamma, gamma)
    coupled, widths = options.candidates == "coupled", (1,) * (gamma + 1)
    return FixedWidths([drafter], sampler, coupled, widths, ("gamma", gamma))


def magicdec(llm: Resources, options: MagicDecOptions, sampler: Sampler) -> FixedWidths:
    """MagicDec's drafting: a chain of γ tokens; without a draft model the target drafts for itself.

    Raises:
        InputError: the draft model cannot be had.
    """
    budget, sinks, gamma, kv = options.budget, options.sinks, options.gamma, options.kv
    drafter: Drafter
    if options.draft_model is None:
        policy, refresh = ("snapkv", 0) if kv == "snapkv" else ("recent", None)
        context = SparseContext(llm.target, policy, budget, sinks, gamma, refresh)
        drafter = PartialDrafter(llm.target, context, mark="chain")
    else:
        drafter = small_model(llm, options.draft_model, ("budget", budget), budget, sinks, gamma, kv)
    coupled, widths = options.candidates == "coupled", (1,) * gamma
    return FixedWidths([drafter], sampler, coupled, widths, ("gamma", gamma))


BUDGET = 1024  # tokens of the partial cache: smaller passes pay earlier
MODEL_BUDGET, MODEL_SINKS = 512, 4  # of a draft model's cache


def auto(llm: Resources, options: AutoOptions, sampler: Sampler) -> ByChance:
    """All drafters that the model has, each where it gains time.

    Raises:
        InputError: the draft model cannot be had.
    """
    target, heads, coupled = llm.target, llm.heads, options.candidates == "coupled"
    drafters: list[Drafter] = [] if sampler.masks is None else [GrammarDrafter(sampler.masks)]
    if options.ngrams != 0:
        drafters.append(PromptLookup(sampler.params.window > 0))
        drafters.append(Recycle(sampler, coupled, llm.learnt().outcomes))
    levels = None
    if heads is not None:
        depth = DEPTH if heads.conditioned else heads.count
        levels = HeadDrafter(target, llm.packed(heads), options.vocabulary == "frequent", depth)
        drafters += [levels] if options.draft != "partial" else []
    if options.draft != "hidden" and options.cache != "full":
        budget, frozen = options.budget or max(BUDGET, options.sinks + 1), options.cache == "partial"
        context = SparseContext(target, "important", budget, options.sinks, LONGEST + 1, frozen=frozen)
        drafters.append(PartialDrafter(target, context, levels, least=context.budget))
    if options.draft_model is not None:
        asked = ("draft_model", "given")
        drafters.append(small_model(llm, options.draft_model, asked, MODEL_BUDGET, MODEL_SINKS, LONGEST))
    if llm.eagle is not None:
        drafters.append(EagleDrafter(llm.eagle))
    return ByChance(drafters, sampler, coupled, llm.learnt())


#: what makes each strategy from resources, its options and the choice rule, which coupled drafts share
STRATEGIES: dict[str, Callable[[Resources, Any, Sampler], FixedWidths | ByChance]] = {
    "auto": auto,
    "autoregressive": autoregressive,
    "tokenswift": TokenSwift,
    "medusa": medusa,
    "triforce": triforce,
    "magicdec": magicdec,
}


def drafts_from(llm: Resources, strategy: str, options: Any) -> tuple[Heads | None, str]:
    """The heads that a strategy has at hand, and what it may draft from, in the words of
    `types.Generation.draft_source`."""
    if strategy in ("auto", "tokenswift"):
        heads = llm.heads
        partial = options.draft != "hidden" and (options.draft == "partial" or options.cache != "full")
        parts = {"heads": heads is not None, "partial passes": partial, "text": options.ngrams != 0}
        if strategy == "auto":
            if options.draft_model is not None:
                parts[f"draft model {llm.draft_models.name(options.draft_model)}"] = True
            if llm.eagle is not None:
                parts[f"EAGLE-3 drafter {llm.eagle.name}"] = True
        return heads, ", ".join(name for name, there in parts.items() if there) or "none"
    if strategy == "medusa":
        return llm.heads_of("medusa"), "heads"
    if strategy == "triforce" or (strategy == "magicdec" and options.draft_model is not None):
        return None, f"draft model {llm.draft_models.name(options.draft_model)}"
    return None, "partial passes" if strategy == "magicdec" else "none"
