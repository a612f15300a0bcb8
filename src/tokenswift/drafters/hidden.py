"""Draft heads on the hidden state that the last verify pass left, a level at a time."""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from tokenswift.drafters.candidates import Candidates
from tokenswift.drafters.control import first_level_ms
from tokenswift.drafters.costs import Costs
from tokenswift.drafters.heads import HeadLevels, newest_hidden
from tokenswift.drafters.offer import Offer, Outcome
from tokenswift.drafters.refusal import heads_source
from tokenswift.drafters.registry import HEAD
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Sequence

HIDDEN = "hidden"
DEPTH = 8  # levels that heads draft
ROWS = 4  # places that one level continues
_CHANCE = 0.35  # of a level's best candidate, before anything is known
_RECENT = 1 / 16  # weight of a new figure in its running mean


class HeadGrower:
    """Levels of the heads below some nodes; shared by all drafters that end in heads.

    Args:
        model: the target.
        heads: draft heads.
        frequent: let them draft frequent tokens and the prompt's only, where they name them.

    Attributes:
        best: by level, running mean of the best candidate's chance.
        refusals: whether their rows can be chosen from.
    """

    def __init__(self, model: DraftModel, heads: Heads, frequent: bool) -> None:
        self.levels = HeadLevels(model, heads, frequent)
        self.depth = DEPTH if heads.conditioned else heads.count
        self.best = [_CHANCE] * (DEPTH + 1)
        self.refusals = heads_source(heads.source)
        self._begun: Sequence | None = None

    def begin(self, sequence: Sequence) -> None:
        """Settle which tokens may be drafted, from the prompt; once, whoever asks."""
        if self._begun is not sequence:
            self._begun = sequence
            self.levels.begin(sequence.tokens)

    def grow(self, candidates: Candidates, node: int, base: Tensor, kind: str) -> None:
        """Levels below ``node``, from the hidden state (1, D), while the next promises more than it costs."""
        control, growth, levels = candidates.control, candidates.growth, self.levels
        rate, row = control.rate, control.row_ms
        nodes, states, head = [node], levels.start(base), 0
        while head < self.depth and nodes and not self.refusals.dropped:
            last = [growth.tokens[node] for node in nodes]
            begun = perf_counter()
            states, logits = levels.level(head, states, last)
            below = candidates.rank(nodes, logits, head, levels.subset, kind, self.refusals)
            ended = perf_counter()
            control.level_took(1000 * (ended - begun))
            firsts = [growth.given[children[0][0]] for children in below if children]
            if firsts:
                self.best[head] += _RECENT * (sum(firsts) / len(firsts) - self.best[head])
            spread = [(chance, child, at) for at, children in enumerate(below) for child, chance in children]
            spread.sort(reverse=True)
            ahead = self.best[min(head + 1, DEPTH)]
            kept = [entry for entry in spread[:ROWS] if entry[0] * ahead > rate * row]
            gain = ahead * sum(chance for chance, _, _ in kept)
            control.busy += perf_counter() - ended
            if gain < rate * (control.level_ms + row * len(kept)):
                return
            nodes = [child for _, child, _ in kept]
            states = states[[at for _, _, at in kept]]
            head += 1


class HiddenDrafter:
    """The heads from the verified state.

    Args:
        grower: the heads.
    """

    name, mark = HIDDEN, HEAD

    def __init__(self, grower: HeadGrower) -> None:
        self.grower, self.refusals = grower, grower.refusals

    def begin(self, sequence: Sequence) -> None:
        """Settle which tokens may be drafted, from the prompt."""
        self.grower.begin(sequence)

    def offer(self, costs: Costs) -> Offer:
        """Two levels."""
        return heads_offer(costs)

    def propose(self, sequence: Sequence, candidates: Candidates) -> None:
        """Levels below the root."""
        self.grower.grow(candidates, 0, newest_hidden(sequence), HIDDEN)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing to learn."""


def heads_offer(costs: Costs) -> Offer:
    """What heads from the verified state expect."""
    return Offer("heads from the verified state", "the heads", 1.5, 3, 2 * first_level_ms(costs))
