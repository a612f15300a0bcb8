"""Logits of passes over one row and over trees against transformers' own pass in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import TypeGuard

import torch
from torch import Tensor

from tokenswift.audit.texts import shipped_texts
from tokenswift.config.loading import LoadConfig
from tokenswift.engine.llm import LLM
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import shared_copy
from tokenswift.models.quality import Quality, compared, judged
from tokenswift.models.target import Target, is_rounded_mixture
from tokenswift.tree import CandidateTree

ONE_ROW: tuple[int, ...] = ()
TREE = (1, 3, 3, 3)  # of the passes that are looked at: siblings at each depth after the root
PLACES = 48  # new tokens whose logits are compared, at most
#: How far the furthest logit of half of the positions may be from the reference's, as a share of
#: the standard deviation of the reference's logits. Seen at most: 1.3e-5, .0028, .047; planted
#: errors from .9 on. A model in int8 is held against it in float32, and by its quality.
BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.2}
WORST = 4.0  # times that, at any position
#: In a mixture of experts in two bytes, another of two nearly tied experts may be asked: that share
#: of the positions is left aside, and the others may be off by this much more, since they look back
#: at such positions. Seen: 4 of 24 positions beyond `WORST`, one by 1.3 standard deviations.
REROUTED = 0.1
BESIDE_REROUTED = 4.0
DEFAULT = LoadConfig()
IN_FLOATS = LoadConfig(dtype="float32", kv_cache_dtype="float32")
READ = 1024  # tokens of the text over which int8 is held against float32


@dataclass(frozen=True, slots=True)
class LogitError:
    """How far passes that should agree differ.

    Attributes:
        positions: how many were compared, over all the vocabulary.
        error: the furthest logit of one-row passes (plain decoding) from tree passes; 0: equal bit
            for bit.
        one_row, tree: the furthest logit from transformers' own pass in float32 over all the text:
            of any position (see `REROUTED`), and of half of them; infinite where one is NaN.
        allowed: what these may be, for the model's dtype.
    """

    positions: int
    error: float
    one_row: tuple[float, float]
    tree: tuple[float, float]
    allowed: tuple[float, float]

    @property
    def sound(self) -> bool:
        """Both kinds of pass compute what transformers' pass computes, in this dtype."""
        errors = zip(self.one_row, self.tree, self.allowed, strict=True)
        return all(max(one_row, tree) <= most for one_row, tree, most in errors)

    def __str__(self) -> str:
        return (
            f"one-row passes are off transformers' pass in float32 by {_figures(self.one_row)}, "
            f"tree passes by {_figures(self.tree)}, each other by {self.error:.1e}; "
            f"valid: at most {_figures(self.allowed)}"
        )


def _figures(errors: tuple[float, float]) -> str:
    """The greatest and the median error in words."""
    greatest, middle = errors
    return f"{greatest:.1e} (median {middle:.1e})"


@torch.inference_mode()
def reference_logits(llm: LLM, text: Sequence[int], count: int) -> Tensor:
    """(count, V): logits at the last places of a text by transformers' own code, in float32, in one
    pass."""
    model = llm.model
    if llm.source.scaling is not None:
        model = shared_copy(model, rotary_of(model, llm.source.scaling))
    if model.dtype != torch.float32:
        model = deepcopy(model).float()
    ids = torch.tensor([list(text)], device=llm.target.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]


@torch.inference_mode()
def logit_error(llm: LLM, prompt: list[int], tokens: list[int]) -> LogitError:
    """The error over a text that plain decoding wrote: ``tokens`` after ``prompt``."""
    tokens = tokens[:PLACES]
    reference = reference_logits(llm, [*prompt, *tokens[:-1]], len(tokens))
    rows = dict(forced_passes(llm, prompt, tokens, ONE_ROW))
    trees = list(forced_passes(llm, prompt, tokens, TREE))
    between = max(_far(rows[i], row) for i, row in trees)
    if computes_in_int8(llm.target):
        with llm.target.computing(IN_FLOATS):
            rows = dict(forced_passes(llm, prompt, tokens, ONE_ROW))
            trees = list(forced_passes(llm, prompt, tokens, TREE))
    of_rows = [_far(row, reference[i]) for i, row in rows.items()]
    of_trees = [_far(row, reference[i]) for i, row in trees]
    dtype = str(llm.target.dtype).removeprefix("torch.")
    typical = BOUNDS[dtype] * float(reference.std())
    left_aside = 0
    if is_rounded_mixture(llm.target.dtype, llm.model.config):
        typical *= BESIDE_REROUTED
        left_aside = int(REROUTED * len(tokens))
    return LogitError(
        positions=len(tokens),
        error=between,
        one_row=(_greatest(of_rows, left_aside), median(of_rows)),
        tree=(_greatest(of_trees, left_aside), median(of_trees)),
        allowed=(WORST * typical, typical),
    )


def computes_in_int8(target: Target) -> TypeGuard[NativeTarget]:
    """Whether products or attention are in int8, as the native decoder alone can have them."""
    in_int8 = target.int8 or target.kv_dtype == torch.int8
    return in_int8 and isinstance(target, NativeTarget)


def int8_quality(llm: LLM, texts: Sequence[list[int]]) -> Quality | None:
    """What int8 costs a text, beside the same weights in float32; None where int8 is not what the
    model computes in by default or by its options.

    Args:
        texts: read where there is no tokenizer for the shipped ones.
    """
    target = llm.target
    in_floats = not computes_in_int8(target)
    if not isinstance(target, NativeTarget) or (in_floats and target.dtype != torch.float32):
        return None
    if llm.tokenizer is None:
        ids = [token for text in texts for token in text]
    else:
        ids = llm.encode("\n\n".join(shipped_texts()))
    ids = ids[: min(READ, llm.target.rotary.limit or READ)]
    with target.computing(DEFAULT) if in_floats else nullcontext():
        if not computes_in_int8(target):
            return None
        in_int8 = judged(target, ids, len(ids) - 1)
    with target.computing(IN_FLOATS):
        reference = judged(target, ids, len(ids) - 1)
    return compared([in_int8], [reference])


@torch.inference_mode()
def forced_passes(
    llm: LLM, prompt: list[int], tokens: list[int], widths: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Teacher-force ``tokens`` through passes of a shape: (i, logits that choose ``tokens[i]``).

    The true tokens stand last among their siblings, so that every commit has to compact the cache.
    """
    target = llm.target
    vocab = target.vocab_size
    rows = len(prompt) + len(tokens) + 1 + sum(widths)
    is_long = target.rotary.is_long(len(prompt) + len(tokens) - 1)  # as transformers has it
    cache = target.new_cache(rows, is_long=is_long)
    if len(prompt) > 1:
        target.prefill(prompt[:-1], cache)
    text = list(prompt)
    done = 0
    while done < len(tokens):
        builder = CandidateTree(text[-1])
        walk = [0]  # the nodes of the true tokens
        for place, width in enumerate(widths, done):
            true = tokens[place] if place < len(tokens) else 0
            for offset in range(1, width):
                builder.add(walk[-1], (true + offset) % vocab)
            walk.append(builder.add(walk[-1], true))
        tree = builder.build()
        positions = torch.tensor(tree.depths, device=target.device) + len(text) - 1
        nodes = torch.tensor(tree.tokens, device=target.device)
        logits = target.logits(target.forward(nodes, positions, cache, tree.parents).hidden)
        for i, node in enumerate(walk[: len(tokens) - done], done):
            yield i, logits[node].clone()
        # all but the last node: a step also ends with a token that is not cached yet
        accepted = walk[: max(1, min(len(widths), len(tokens) - done))]
        cache.commit(tuple(accepted))
        text += tokens[done : done + len(accepted)]
        done += len(accepted)


def _greatest(errors: Sequence[float], left_aside: int) -> float:
    """The greatest error but for some; infinite where any is."""
    by_size = sorted(errors, reverse=True)
    return math.inf if by_size[0] == math.inf else by_size[left_aside]


def _far(one: Tensor, other: Tensor) -> float:
    """Greatest absolute difference of a logit; infinite where it is NaN. Tokens that are left out
    (-inf) do not count."""
    other = other.to(one.device)
    compared = (one != -torch.inf) & (other != -torch.inf)
    return float((one.float() - other.float())[compared].abs().nan_to_num(torch.inf).max())
