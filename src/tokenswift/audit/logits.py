"""Logits of plain decoding's and of tree passes against transformers' own pass in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tokenswift.engine.llm import LLM
from tokenswift.loader.rope import rotary_of
from tokenswift.models.generic import shared_copy
from tokenswift.tree import CandidateTree, tree_nodes

ONE_ROW: tuple[int, ...] = ()
#: tree passes that are looked at: siblings at each depth after the root
TREES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 3, 3, 3))
PLACES = 48  # new tokens whose logits are compared, at most
#: How far the furthest logit of half of the positions may be from the reference's, as a share of the standard
#: deviation of the reference's logits. Seen at most: 1.3e-5, .0028, .047, .21; planted errors from .9 on.
BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.2, "int8": 0.6}
WORST = 4.0  # times that, at any position


@dataclass(frozen=True, slots=True)
class Distance:
    """The furthest logit of each position, over positions: greatest and median; infinite where one is NaN."""

    worst: float
    typical: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Distance:
        """From one value a position."""
        return cls(max(values), median(values))


@dataclass(frozen=True, slots=True)
class LogitError:
    """How far passes that should agree differ.

    Attributes:
        positions: that were compared, over the whole vocabulary.
        error: the furthest logit of one-row passes (plain decoding) from tree passes; 0: equal bit for bit.
        one_row, tree: from transformers' own pass in float32 over the whole text.
        allowed: what they may be, for the model's dtype.
    """

    positions: int
    error: float
    one_row: Distance
    tree: Distance
    allowed: Distance

    @property
    def sound(self) -> bool:
        """Both kinds of pass compute what transformers' pass computes, in this dtype."""
        passes, allowed = (self.one_row, self.tree), self.allowed
        return all(p.worst <= allowed.worst and p.typical <= allowed.typical for p in passes)

    def record(self) -> dict[str, Any]:
        """JSON-ready values: greatest differences by name, medians over positions under ``typical``."""
        named = {"one_row": self.one_row, "tree": self.tree, "allowed": self.allowed}
        return {
            "positions": self.positions,
            "error": self.error,
            **{name: distance.worst for name, distance in named.items()},
            "typical": {name: distance.typical for name, distance in named.items()},
            "sound": self.sound,
        }


class _InFloat32(TorchFunctionMode):
    """Every torch function sees tensors of half precision in float32: a model is not copied, its weights are
    converted for each operation that reads them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute; only the dtype is another one
            return _float32(func(*args, **(kwargs or {})), torch.dtype)
        return func(*tree_map(_float32, args), **tree_map(_float32, kwargs or {}))


def _float32(value: Any, kinds: Any = (Tensor, torch.dtype)) -> Any:
    half = (torch.bfloat16, torch.float16)
    if isinstance(value, kinds) and isinstance(value, torch.dtype):
        return torch.float32 if value in half else value
    return value.float() if isinstance(value, kinds) and value.dtype in half else value


@torch.inference_mode()
def reference_logits(llm: LLM, text: Sequence[int], count: int) -> Tensor:
    """(count, V): logits at the last places of a text by transformers' own code, in float32, in one pass."""
    model = llm.model
    if llm.source.scaling is not None:
        model = shared_copy(model, rotary_of(model, llm.source.scaling))
    ids = torch.tensor([list(text)], device=llm.target.device)
    with _InFloat32():
        return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]


@torch.inference_mode()
def logit_error(llm: LLM, prompt: list[int], tokens: list[int]) -> LogitError:
    """The error over a text that plain decoding wrote: ``tokens`` after ``prompt``."""
    tokens = tokens[:PLACES]
    reference = reference_logits(llm, [*prompt, *tokens[:-1]], len(tokens))
    rows = dict(forced_passes(llm, prompt, tokens, ONE_ROW))
    error, tree = 0.0, Distance(0.0, 0.0)
    for shape in TREES:
        found = []
        for i, row in forced_passes(llm, prompt, tokens, shape):
            error = max(error, _far(rows[i], row))
            found.append(_far(row, reference[i]))
        over = Distance.over(found)
        tree = Distance(max(tree.worst, over.worst), max(tree.typical, over.typical))
    one_row = Distance.over([_far(row, reference[i]) for i, row in rows.items()])
    int8 = llm.target.whole or llm.target.keys == torch.int8
    kind = "int8" if int8 else str(llm.target.dtype).removeprefix("torch.")
    typical = BOUNDS[kind] * float(reference.std())
    return LogitError(len(tokens), error, one_row, tree, Distance(WORST * typical, typical))


@torch.inference_mode()
def last_logits(llm: LLM, text: list[int]) -> Tensor:
    """(V,): the logits behind a text, by a pass of one row."""
    return next(forced_passes(llm, text, [0], ONE_ROW))[1]


def forced_passes(
    llm: LLM, prompt: list[int], tokens: list[int], widths: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Teacher-force ``tokens`` through passes of a shape: (i, logits that choose ``tokens[i]``).

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


def _far(one: Tensor, other: Tensor) -> float:
    """Greatest absolute difference of a logit, of tokens that are left out aside; infinite where either holds
    NaN."""
    other = other.to(one.device)
    chosen = (one != -torch.inf) & (other != -torch.inf)
    furthest = float((one.float() - other.float())[chosen].abs().max())
    return furthest if furthest == furthest else float("inf")
