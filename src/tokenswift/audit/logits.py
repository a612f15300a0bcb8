"""Logits of plain decoding's and of tree passes against transformers' own pass in float32, and the
distribution of whole runs against the probabilities that they should follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.loader.rope import rotary_of
from tokenswift.models.generic import shared_copy
from tokenswift.tree import CandidateTree

ONE_ROW: tuple[int, ...] = ()
#: tree passes that are looked at: siblings at each depth after the root
TREES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 3, 3, 3))
PLACES = 48  # new tokens whose logits are compared, at most
#: How far the furthest logit of half of the positions may be from the reference's, as a share of the standard
#: deviation of the reference's logits. Seen at most: 1.3e-5, .0028, .047, .21; planted errors from .9 on.
BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.2, "int8": 0.6}
WORST = 4.0  # times that, at any position
LEAST = 5.0  # expected count of a cell of the chi-square test
FEWEST = 100  # runs of a test
CONTEXT = 32  # tokens of a prompt that runs go on from: its last
LENGTH = 2  # new tokens of a run: the second comes from a drafted node, or from a step of its own
HALF = (torch.bfloat16, torch.float16)
Pair = tuple[int, ...]  # of its tokens the first two, one or none


# ---- logits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distance:
    """The furthest logit of each position, over positions: greatest and median; infinite where one is NaN."""

    worst: float
    typical: float


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

    def __str__(self) -> str:
        far = [f"{d.worst:.1e} (median {d.typical:.1e})" for d in (self.one_row, self.tree, self.allowed)]
        return (
            f"one-row passes are off transformers' pass in float32 by {far[0]}, tree passes by {far[1]}, "
            f"each other by {self.error:.1e}; valid: at most {far[2]}"
        )


class _InFloat32(TorchFunctionMode):
    """Every torch function sees tensors of half precision in float32: a model is not copied, its weights are
    converted for each operation that reads them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as the dtype
            return _float32(func(*args, **(kwargs or {})))
        return func(*tree_map(_float32, args), **tree_map(_float32, kwargs or {}))


def _float32(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALF else value
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


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
    trees = [one for shape in TREES for one in forced_passes(llm, prompt, tokens, shape)]
    one_row, tree = (
        Distance(max(far), median(far))
        for far in ([_far(row, reference[i]) for i, row in found] for found in (rows.items(), trees))
    )
    int8 = llm.target.whole or llm.target.keys == torch.int8
    kind = "int8" if int8 else str(llm.target.dtype).removeprefix("torch.")
    typical = BOUNDS[kind] * float(reference.std())
    allowed = Distance(WORST * typical, typical)
    return LogitError(len(tokens), max(_far(rows[i], row) for i, row in trees), one_row, tree, allowed)


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
    cache = target.new_cache(len(prompt) + len(tokens) + 1 + sum(widths))
    if len(prompt) > 1:
        target.prefill(prompt[:-1], cache)
    text, done = list(prompt), 0
    while done < len(tokens):
        builder, walk = CandidateTree(text[-1]), [0]
        for depth, width in enumerate(widths, done):
            true = tokens[depth] if depth < len(tokens) else 0
            for k in range(1, width):
                builder.add(walk[-1], (true + k) % vocab)
            walk.append(builder.add(walk[-1], true))
        tree = builder.build()
        positions = torch.tensor(tree.depths, device=target.device) + len(text) - 1
        nodes = torch.tensor(tree.tokens, device=target.device)
        logits = target.logits(target.forward(nodes, positions, cache, tree.parents).hidden)
        for i, node in enumerate(walk[: len(tokens) - done], done):
            yield i, logits[node].clone()
        # all but the last node: a step also ends with a token that is not cached yet
        taken = walk[: max(1, min(len(widths), len(tokens) - done))]
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


# ---- the distribution -----------------------------------------------------------------------------


def chi_square(
    outcomes: Iterable[Hashable], distribution: Mapping[Any, float], least: float = LEAST
) -> float:
    """p-value of Pearson's chi-square test of outcomes against an exactly known distribution.

    Cells are pooled, rarest first, until each has an expected count of at least ``least``. An
    outcome that the distribution excludes gives 0.

    Raises:
        ValueError: too few outcomes for a test.
    """
    counts = Counter(outcomes)
    if any(distribution.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return 0.0
    cells = [[0.0, 0]]  # expected, observed
    for outcome, probability in sorted(distribution.items(), key=lambda item: item[1]):
        cells[-1][0] += probability * counts.total()
        cells[-1][1] += counts[outcome]
        if cells[-1][0] >= least:
            cells.append([0.0, 0])
    rest = cells.pop()
    if len(cells) < 2:
        raise ValueError(f"{counts.total()} outcomes are too few for a test")
    cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@torch.inference_mode()
def likely_pairs(llm: LLM, prompt: list[int], params: SamplingParams, runs: int) -> dict[Pair, float]:
    """Probabilities of the two tokens after a prompt, from the logits of one-row passes.

    Args:
        prompt: token ids.
        runs: pairs that fewer than :data:`LEAST` of these runs are expected to show are one outcome, that of
            their first token, or () where that is as rare.
    """
    sampler = llm.target.sampler(params)

    def after(text: list[int], chance: float) -> Iterator[tuple[int, float]]:
        scores = sampler.scores(last_logits(llm, text)[None], text, [[]])[0]
        for token, each in enumerate((scores.double().softmax(-1) * chance).tolist()):
            if each * runs >= LEAST:
                yield token, each

    found: dict[Pair, float] = {}
    for first, p in after(prompt, 1.0):
        often = dict(after([*prompt, first], p))
        found |= {(first, second): both for second, both in often.items()}
        found[first,] = max(0.0, p - sum(often.values()))
    return {**found, (): max(0.0, 1.0 - sum(found.values()))}


def outcome(pair: Pair, law: dict[Pair, float]) -> Pair:
    """What of a pair of tokens :func:`likely_pairs` tells apart."""
    return next(known for known in (pair, pair[:1], ()) if known in law)


def testable(llm: LLM, prompt: list[int], params: SamplingParams, runs: int = FEWEST) -> bool:
    """Whether so many runs can show two outcomes after a prompt often enough for a test."""
    return sum(p * runs >= LEAST for p in likely_pairs(llm, prompt, params, runs).values()) > 1


def pairs_written(
    llm: LLM, prompt: list[int], strategy: str, options: dict[str, Any], params: SamplingParams, runs: int
) -> list[Pair]:
    """The two tokens after a prompt in whole runs, with the sampling's seed and those after it."""
    samplings = (replace(params, seed=params.seed + i) for i in range(runs))
    made = (llm.generate(prompt, LENGTH, strategy, options, one, ignore_eos=True) for one in samplings)
    return [tuple(one.token_ids) for one in made]
