"""Looking into model passes: the logits behind each choice, and the numeric error between pass shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenswift.llm import LLM
from tokenswift.tree import TreeBuilder, tree_nodes

#: Shapes of the tree passes that the error is measured with: siblings at each depth after the root.
SHAPES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 3, 3, 3))
_SOUND = 6.0  # a tree pass may differ this many times more from the reference than a one-row pass


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
    llm.target = _Watched(target, tell)  # type: ignore[assignment]
    try:
        yield
    finally:
        llm.target = target


@dataclass(frozen=True, slots=True)
class NumericError:
    """How far passes that should agree differ: greatest absolute difference of a logit.

    Attributes:
        positions: positions of text that were compared, over the whole vocabulary.
        error: one-row passes (plain decoding) against tree passes. *The* numeric error.
        one_row, tree: each of them against transformers' own pass over the whole text at once.
    """

    positions: int
    error: float
    one_row: float
    tree: float

    @property
    def sound(self) -> bool:
        """Tree passes are about as near to the reference as one-row passes: both compute the same."""
        return max(self.tree, self.one_row) < float("inf") and self.tree <= _SOUND * max(self.one_row, 1e-6)


@torch.inference_mode()
def numeric_error(llm: LLM, prompt: list[int], tokens: list[int], kept: dict[int, Tensor]) -> NumericError:
    """Measure the error over a text that plain decoding wrote.

    Args:
        kept: logits (V,) of plain decoding's one-row passes: ``kept[i]`` chose ``tokens[i]``.
    """
    text = [*prompt, *tokens]
    own = _reference(llm, text, [len(prompt) - 1 + i for i in kept])
    reference = dict(zip(kept, own, strict=True))
    one_row = max((_far(kept[i], reference[i]) for i in kept), default=0.0)
    error = tree = 0.0
    for shape in SHAPES:
        for i, row in forced_passes(llm, prompt, tokens, shape):
            if i in kept:
                error = max(error, _far(kept[i], row))
                tree = max(tree, _far(reference[i], row))
    return NumericError(len(kept), error, one_row, tree)


def _far(one: Tensor, other: Tensor) -> float:
    """Greatest absolute difference; infinite where either holds NaN."""
    far = float((one - other.to(one.device)).abs().max())
    return far if far == far else float("inf")


def _reference(llm: LLM, text: list[int], places: list[int]) -> list[Tensor]:
    """Logits at some places of a text by transformers' own attention, the whole text in one pass."""
    body = llm.model.model
    hidden = body(input_ids=torch.tensor([text], device=llm.target.device), use_cache=False)
    rows = hidden.last_hidden_state[0, places]
    return list(llm.model.lm_head(rows).float())


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
        builder = TreeBuilder(text[-1])
        levels = []
        for depth, width in enumerate(widths):
            true = tokens[done + depth] if done + depth < len(tokens) else 0
            wrong = [(true + 1 + k) % vocab for k in range(width - 1)]
            levels.append([*wrong, true])
        builder.add_levels(levels)
        tree = builder.build(len(widths))
        positions = torch.tensor(tree.depths, device=target.device) + len(text) - 1
        nodes = torch.tensor(tree.tokens, device=target.device)
        logits = target.logits(target.forward(nodes, positions, cache, tree.parents).hidden)
        walk = [0]
        for depth in range(min(len(widths), len(tokens) - done)):
            walk.append(builder.child(walk[-1], tokens[done + depth]))
        for depth, node in enumerate(walk[: len(tokens) - done]):
            yield done + depth, logits[node]
        # all but the last node: a step also ends with a token that is not cached yet
        taken = walk[:-1] if len(walk) > 1 else walk
        cache.commit(tuple(taken))
        text += tokens[done : done + len(taken)]
        done += len(taken)
