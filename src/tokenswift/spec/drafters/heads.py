"""Draft heads: their logits, level by level, and the drafter that ends in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.kernels.weights import Packed
from tokenswift.kv.pages import to_device
from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import RefusedRow
from tokenswift.sampling.ranking import LogitRows, Subset
from tokenswift.spec.adaptive.cost import Costs
from tokenswift.spec.adaptive.estimate import CostEstimate, Outcome
from tokenswift.spec.drafters.candidates import Candidates
from tokenswift.spec.drafters.invalid_logits import heads_source
from tokenswift.spec.drafters.registry import HEAD
from tokenswift.spec.drafters.vocabulary import DraftVocabulary, draft_vocabulary
from tokenswift.spec.heads.modules import Heads
from tokenswift.spec.heads.packed import packed_steps
from tokenswift.spec.strategy import TokenSequence

HIDDEN = "hidden"
DEPTH = 8  # levels of heads in adaptive drafting


def newest_hidden(sequence: TokenSequence) -> Tensor:
    """Hidden state (1, D) that the last verify pass left for the newest committed token.

    Raises:
        ValueError: nothing was committed yet.
    """
    if sequence.newest is None:
        raise ValueError("nothing was committed yet")
    return sequence.newest.hidden[sequence.newest_row][None]


class HeadLevels:
    """The heads' logits, level by level.

    Args:
        model: the target.
        heads: draft heads.
        frequent: let them draft frequent tokens and the prompt's only, where they name them.
    """

    def __init__(self, model: BaseTarget, heads: Heads, frequent: bool) -> None:
        self.model, self.heads, self.frequent = model, heads, frequent
        self.vocabulary = DraftVocabulary(model, model.vocab_size)
        self._steps = packed_steps(heads, model.backend, model.whole)
        self._base = torch.empty(0, dtype=torch.float32)

    def begin(self, tokens: list[int]) -> None:
        """Settle which tokens may be drafted, from the prompt."""
        if self.frequent and not self.heads.own_lm_heads:
            self.vocabulary = draft_vocabulary(self.model, self.heads.frequent, tokens, self.model.vocab_size)

    @property
    def subset(self) -> Subset | None:
        """The tokens that the columns of logits stand for; None for all."""
        return self.vocabulary.subset

    def start(self, base: Tensor) -> Tensor:
        """Take the hidden state (1, D) that the next levels start from; it is the first head's `states`."""
        self._base = base
        return base

    def level(self, head: int, states: Tensor, last: list[int] | Tensor) -> tuple[Tensor, Tensor]:
        """States (m, D) and logits (m, S) of a head, from those of the head before it.

        Args:
            head: counted from 0.
            last: the token before the one that the head predicts, for each row; where the model is, or here.
        """
        heads = self.heads
        if self._steps is None:
            embeds = self._embeds(last) if heads.conditioned else None
            states = heads.advance(head, states, self._base.expand(len(states), -1), embeds)
            if heads.own_lm_heads:
                return states, heads.own_logits(head, states)
            return states, self.vocabulary.project(heads.normed(head, states))
        step = self._steps[min(head, len(self._steps) - 1)]
        rows = [part for part in self.vocabulary.rows if isinstance(part, Packed)]  # or dense
        states, logits = step.level(states, self._base, self._embeds(last), head == 0, rows)
        return states, logits if rows else self.vocabulary.project(states)

    def _embeds(self, tokens: list[int] | Tensor) -> Tensor:
        known = isinstance(tokens, list)
        return self.model.embed(to_device(tokens, self.model.device) if known else tokens)


def level_of(model: BaseTarget, heads: Heads | None) -> Callable[[], object] | None:
    """A call that evaluates one level for one row and ranks it, to be timed; None without heads."""
    if heads is None:
        return None
    levels = HeadLevels(model, heads, frequent=True)
    levels.begin([0])
    sampler = model.sampler(SamplingParams())
    states = levels.start(torch.zeros(1, heads.config.hidden_size, dtype=torch.float32, device=model.device))

    def level() -> object:
        logits = levels.level(0, states, [0])[1]
        with suppress(RefusedRow):  # a run that meets one drafts nothing there
            return sampler.candidates(
                LogitRows(logits, [0], [[]], [1], [4], coupled=True, subset=levels.subset)
            )

    return level


def heads_offer(costs: Costs) -> CostEstimate:
    """What heads from the verified state expect: of one candidate or of two, what pays better."""
    level = costs.level()
    trees = ((1.4, 2, 1.5 * level), (1.5, 3, 2 * level))
    tokens, rows, price = max(trees, key=lambda tree: tree[0] / (tree[2] + costs.verify(tree[1], 0)))
    return CostEstimate("heads from the verified state", "the heads", tokens, rows, price)


class HeadDrafter:
    """Levels of draft heads, on the state that the last verify pass left, or below another drafter's passes.

    Heads that see the drafted token before theirs (*conditioned*) are evaluated for every place; of the
    others a level has one row, for all its places.

    Args:
        model: the target.
        heads: draft heads.
        frequent: let them draft frequent tokens and the prompt's only, where they name them.
        depth: levels at most; None: one for each head.

    Attributes:
        refusals: whether their rows can be chosen from; heads that were left out draft nothing.
    """

    name, mark = HIDDEN, HEAD

    def __init__(self, model: BaseTarget, heads: Heads, frequent: bool, depth: int | None = None) -> None:
        self.heads, self.levels = heads, HeadLevels(model, heads, frequent)
        self.depth = heads.count if depth is None else depth
        self.refusals = heads_source(heads.source)
        self._begun: TokenSequence | None = None

    def begin(self, sequence: TokenSequence) -> None:
        """Settle which tokens may be drafted, from the prompt; once, whoever asks."""
        if self._begun is not sequence:
            self._begun = sequence
            self.levels.begin(sequence.tokens)

    def needs(self, text: int, row: int) -> list[Need]:
        """Nothing beside the tree's rows."""
        return []

    def offer(self, costs: Costs) -> CostEstimate:
        """Two levels from the verified state."""
        return heads_offer(costs)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Levels below the root."""
        if sequence.newest is not None:
            self.grow(candidates, [0], newest_hidden(sequence), HIDDEN)

    def grow(self, candidates: Candidates, nodes: list[int], base: Tensor, kind: str) -> None:
        """Levels below ``nodes``, from the hidden state (1, D), as long as the candidates ask for them."""
        levels, states, head = self.levels, self.levels.start(base), 0
        if self.heads.conditioned:
            states = states.expand(len(nodes), -1)
        while head < self.depth and nodes and not self.refusals.dropped:
            last = [candidates.tree.tokens[node] for node in nodes[: len(states)]]
            states, logits = levels.level(head, states, last)
            below = candidates.rank(nodes, logits, head, levels.subset, kind, self.refusals)
            nodes, rows = candidates.go_on(below, head)
            if self.heads.conditioned:
                states = states[to_device(rows, states.device)]
            head += 1

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Nothing to learn."""
