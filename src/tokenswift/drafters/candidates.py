"""What drafters propose in one step: candidates in one tree, each with the chance that it is right."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenswift.drafters.calibration import Calibration
from tokenswift.drafters.control import Control
from tokenswift.drafters.growth import Growth
from tokenswift.drafters.refusal import Source
from tokenswift.interfaces import Sequence
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Ranked, Subset
from tokenswift.types import RunError

if TYPE_CHECKING:
    from tokenswift.drafters.drafter import Drafter

WIDTH = 4  # candidates of a place
CHAIN = 6  # passes in one step that only draft


class _Ranking(NamedTuple):
    """A ranking below a node, to be learnt from: its kind, features, chances and tokens."""

    node: int
    kind: str
    features: list[tuple[float, ...]]
    chances: list[float]
    tokens: list[int]


class Candidates:
    """The candidates of one step. Nodes are numbered; node 0 is the root, the newest token of the text.

    Args:
        text: the text so far, root included.
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
        calibration: makes chances of rankings.
        control: knows rate and prices.

    Attributes:
        growth: the tree of candidates.
        loading: seconds of drafting that are no price of a step, such as the selection of a cache.
        ranked: sources that were ranked from, by name.
    """

    def __init__(
        self, text: list[int], sampler: Sampler, coupled: bool, calibration: Calibration, control: Control
    ) -> None:
        self.text, self.sampler, self.coupled = text, sampler, coupled
        self.calibration, self.control = calibration, control
        self.growth = Growth(text[-1])
        self.loading = 0.0
        self.ranked: dict[str, Source] = {}
        self._rankings: list[_Ranking] = []
        self._told: list[tuple[int, int, float]] = []  # parent, token, chance of candidates with their own
        self._drafter: Drafter | None = None

    @property
    def rate(self) -> float:
        """Tokens a millisecond that decoding reaches now: what takes t ms has to bring ``rate · t``."""
        return self.control.rate

    @property
    def row_ms(self) -> float:
        """Milliseconds of one more row of a verify pass."""
        return self.control.row_ms

    @property
    def drafter(self) -> Drafter:
        """Who proposes.

        Raises:
            ValueError: nobody does.
        """
        if self._drafter is None:
            raise ValueError("no drafter proposes now")
        return self._drafter

    def ask(self, drafter: Drafter, sequence: Sequence) -> None:
        """Let a drafter propose.

        Raises:
            RunError: what it proposed is no token.
        """
        self._drafter, before = drafter, len(self.growth)
        drafter.propose(sequence, self)
        size = sequence.model.vocab_size
        for token in self.growth.tokens[before:]:
            if not 0 <= token < size:
                raise RunError(
                    f"the drafter {drafter.name} proposed the token {token}; valid: 0 to {size - 1}"
                )

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to ``node``."""
        return self.growth.path(node)

    def chance(self, node: int) -> float:
        """Chance that the target chooses the node's token, given that it chose its parent's."""
        return self.growth.given[node]

    def add(self, parent: int, token: int, chance: float) -> int:
        """The node of ``token`` below ``parent``, with a chance that the drafter itself knows."""
        self._told.append((parent, token, chance))
        return self.growth.add(parent, token, chance, self.drafter.mark.name)

    def offer(
        self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None
    ) -> list[tuple[int, float]]:
        """Add a ranking's candidates below ``node``, with chances that are learnt from what came of others.

        Args:
            ranked: tokens, best first, with scores and shares.
            level: levels below where the drafter starts.
            kind: rankings whose chances are learnt together; the drafter's name where it has one kind.
        Returns:
            Node and chance of the whole path of each, in the order of the ranking.
        """
        kind = self.drafter.name if kind is None else kind
        chances, made = self.calibration.chances(kind, ranked, level)
        self._rankings.append(_Ranking(node, kind, made, chances, ranked.tokens))
        growth, mark = self.growth, self.drafter.mark.name
        above = growth.chance(node)
        below = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = growth.add(node, token, chance, mark)
            below.append((child, above * growth.given[child]))
        return below

    def rank(
        self,
        nodes: list[int],
        logits: torch.Tensor,
        level: int = 0,
        subset: Subset | None = None,
        kind: str | None = None,
        refusals: Source | None = None,
    ) -> list[list[tuple[int, float]]]:
        """Rank logits (n, S) by the choice rule and :meth:`offer` the best below each of n ``nodes``.

        A row that no token can be chosen from has no candidates.

        Args:
            subset: what the columns stand for; None: token ids.
            refusals: counts such rows; the drafter's own by default.
        """
        text = self.text
        of = self.drafter.refusals if refusals is None else refusals
        self.ranked[of.name] = of
        paths = [self.growth.path(node) for node in nodes]
        positions = [len(text) + len(path) for path in paths]
        found = of.candidates(
            self.sampler, logits, text, paths, positions, [WIDTH] * len(nodes), self.coupled, subset
        )
        begun = perf_counter()
        below = [self.offer(node, row, level, kind) for node, row in zip(nodes, found, strict=True)]
        self.control.busy += perf_counter() - begun
        return below

    def chain(
        self,
        sequence: Sequence,
        run: Callable[[list[int]], torch.Tensor],
        subset: Subset | None = None,
        kind: str | None = None,
        most: int = CHAIN,
    ) -> tuple[int, float]:
        """Candidates by one pass after another while the next promises more than it costs.

        Args:
            run: a path below the root → logits (1, S) of what follows it.
            most: passes at most.
        Returns:
            The likeliest path's last node and its chance; chance 0 where nothing was ranked.
        """
        control, known = self.control, self.control.passes[self.drafter.name]
        node, chance = 0, 1.0
        for done in range(most):
            begun = perf_counter()
            logits = run(self.growth.path(node))
            sequence.draft_passes += 1
            below = self.rank([node], logits, done, subset, kind)[0]
            known.took(1000 * (perf_counter() - begun))
            if not below:
                return node, 0.0
            node, chance = below[0]
            known.led(self.growth.given[node])
            if chance * known.lead < control.rate * (known.ms + control.row_ms):
                break
        return node, chance

    def learn(self, new: list[int], rankings: bool) -> None:
        """Take in the tokens that came; ``rankings``: learn from rankings, too."""
        for node, kind, made, chances, tokens in self._rankings if rankings else ():
            right = self._came(node, new)
            if right is not None:
                self.calibration.learn(kind, made, chances, tokens, right)
        for parent, token, chance in self._told:
            right = self._came(parent, new)
            if right is not None:
                self.calibration.reliability.add(chance, token == right)

    def _came(self, node: int, new: list[int]) -> int | None:
        """The token that came where ``node``'s path had come; None where it had not."""
        depth = self.growth.depths[node]
        if depth < len(new) and self.growth.path(node) == new[:depth]:
            return new[depth]
        return None
