"""Looking into model passes: the logits behind each choice, and the numeric error between pass shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenswift.audit.rounding import Distance, Rounding, far, measure_rounding
from tokenswift.engine.llm import LLM
from tokenswift.tree import CandidateTree, tree_nodes

#: Shapes of the tree passes that the error is measured with: siblings at each depth after the root.
SHAPES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 3, 3, 3))


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """One pass that a step's tokens were chosen from: node tokens, positions, parents, logits (n, V)."""

    tokens: list[int]
    positions: list[int]
    parents: list[int]
    logits: Tensor

    def row_after(self, text: Sequence[int]) -> Tensor | None:
        """The logits of the node whose context is exactly ``text``; None if there is none."""
        root = self.positions[0]
        for row, position in enumerate(self.positions):
            if position == len(text) - 1:
                nodes = [row]
                while self.parents[nodes[0]] >= 0:
                    nodes.insert(0, self.parents[nodes[0]])
                if [self.tokens[node] for node in nodes] == list(text[root:]):
                    return self.logits[row]
        return None


class _Watched:
    """A target that tells of every verify pass; all else is the target's own."""

    def __init__(self, target: Any, tell: Callable[[VerifyPass], None]) -> None:
        self._target, self._tell = target, tell
        self._last: tuple[Tensor, Tensor, list[int], Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any, parents: Any = None) -> Any:
        result = self._target.forward(tokens, positions, cache, parents)
        if parents is not None:
            self._last = tokens, positions, list(parents), result.hidden
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._target.logits(hidden)
        if self._last is not None and self._last[3] is hidden:
            tokens, positions, parents, _ = self._last
            self._tell(VerifyPass(tokens.tolist(), positions.tolist(), parents, logits))
            self._last = None
        return logits


@contextmanager
def watching(llm: LLM, tell: Callable[[VerifyPass], None]) -> Iterator[None]:
    """Every verify pass of ``llm`` is told to ``tell`` while the context lasts."""
    target: Any = llm.target
    llm.resources.target = _Watched(target, tell)  # type: ignore[assignment]
    try:
        yield
    finally:
        llm.resources.target = target


@dataclass(frozen=True, slots=True)
class NumericError:
    """How far passes that should agree differ: greatest absolute difference of a logit.

    Attributes:
        positions: positions of text that were compared, over the whole vocabulary.
        error: one-row passes (plain decoding) against tree passes. *The* numeric error; 0 where they are
            equal bit for bit.
        one_row, tree: each of them against the reference, transformers' own pass over the whole text in
            finer arithmetic (`audit.rounding`).
        rounding: what rounding alone does to the model, by transformers' own passes.
    """

    positions: int
    error: float
    one_row: Distance
    tree: Distance
    rounding: Rounding

    @property
    def sound(self) -> bool:
        """Both kinds of pass are about as near to the reference as transformers' own pass in the same
        dtype: all compute the same. An error that both kinds share is an error."""
        agree = self.error < float("inf")
        return agree and all(self.rounding.explains(passes) for passes in (self.one_row, self.tree))

    @property
    def unit(self) -> float:
        """What two sound computations of a logit may differ by: the numeric error, or what transformers'
        own pass is off, whichever is greater."""
        return max(self.error, self.rounding.unit)

    def record(self) -> dict[str, Any]:
        """JSON-ready values: greatest differences by name, medians over positions under ``typical``."""
        own, allowed = self.rounding.own, self.rounding.allowed
        named = {"one_row": self.one_row, "tree": self.tree, "own": own, "allowed": allowed}
        return {
            "positions": self.positions,
            "error": self.error,
            **{name: distance.worst for name, distance in named.items()},
            "typical": {name: distance.typical for name, distance in named.items()},
            "sound": self.sound,
        }


@torch.inference_mode()
def numeric_error(llm: LLM, prompt: list[int], tokens: list[int], kept: dict[int, Tensor]) -> NumericError:
    """Measure the error over a text that plain decoding wrote.

    Args:
        kept: logits (V,) of plain decoding's one-row passes: ``kept[i]`` chose ``tokens[i]``.
    """
    found, rows = measure_rounding(llm, [*prompt, *tokens], [len(prompt) - 1 + i for i in kept])
    reference = dict(zip(kept, rows, strict=True))
    one_row = Distance.over([far(kept[i], reference[i]) for i in kept])
    error, tree = 0.0, Distance.over([])
    for shape in SHAPES:
        distances = []
        for i, row in forced_passes(llm, prompt, tokens, shape):
            if i in kept:
                error = max(error, far(kept[i], row))
                distances.append(far(reference[i], row))
        tree = tree.or_worse(Distance.over(distances))
    return NumericError(len(kept), error, one_row, tree, found)


def forced_passes(
    llm: LLM, prompt: list[int], tokens: list[int], widths: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Teacher-force ``tokens`` through tree passes of a shape: (i, logits that choose ``tokens[i]``).

    The true tokens stand last among their siblings, so that every commit has to compact the cache.
    """
    target = llm.target
    vocab = target.vocab_size
    cache = target.new_cache(len(prompt) + len(tokens) + tree_nodes(widths))
    if len(prompt) > 1:
        target.prefill(prompt[:-1], cache)
    text, done = list(prompt), 0
    while done < len(tokens):
        builder = CandidateTree(text[-1])
        levels = []
        for depth, width in enumerate(widths):
            true = tokens[done + depth] if done + depth < len(tokens) else 0
            wrong = [(true + 1 + k) % vocab for k in range(width - 1)]
            levels.append([*wrong, true])
        builder.add_levels(levels)
        tree = builder.build()
        positions = torch.tensor(tree.depths, device=target.device) + len(text) - 1
        nodes = torch.tensor(tree.tokens, device=target.device)
        logits = target.logits(target.forward(nodes, positions, cache, tree.parents).hidden)
        walk = [0]
        for depth in range(min(len(widths), len(tokens) - done)):
            walk.append(builder.add(walk[-1], tokens[done + depth]))
        for depth, node in enumerate(walk[: len(tokens) - done]):
            yield done + depth, logits[node]
        # all but the last node: a step also ends with a token that is not cached yet
        taken = walk[:-1] if len(walk) > 1 else walk
        cache.commit(tuple(taken))
        text += tokens[done : done + len(taken)]
        done += len(taken)
