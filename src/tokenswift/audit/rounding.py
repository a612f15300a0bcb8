"""The reference of an audit: transformers' own forward pass, and how far its rounding carries it.

Whatever this library computes in the model's dtype may differ from exact arithmetic by about as much as
transformers' own code does in that dtype, and by no more. That amount cannot be told from the dtype, the
number of layers and the scale of the logits alone (eps · spread · √layers is short by a factor of 1 to 30,
depending on the weights), but it can be measured: transformers' pass is run twice over the same weights, in
the model's dtype and one precision finer, and their difference is what rounding does to *this* model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface

from tokenswift.engine.llm import LLM
from tokenswift.kernels.torch import CHUNK, quantized
from tokenswift.loader.rope import rotary_of
from tokenswift.models.generic import shared_copy

#: How many times further from the reference than transformers' own pass a sound pass may be. Sums are kept
#: in float32 whatever the dtype, and each result is rounded to it: in half precision, or to int8,
#: that rounding is nearly all of the error and the same for every implementation. In float32 the order of the
#: sums is all of it, which is the kernel's affair: in sums of thousands of terms the orders differ by up to
#: this much.
MARGIN = {torch.float32: 16.0}
MARGIN_HALF = 4.0
#: Positions that transformers' own error is measured at, at least: of fewer the greatest says little.
FEWEST = 16
#: name of the attention that a reference of int8 keys and values runs through
ATTENTION = "tokenswift_audit_int8"


@dataclass(frozen=True, slots=True)
class Distance:
    """How far rows of logits are from the reference: greatest difference of any logit at a position.

    Attributes:
        worst, typical: the greatest and the median over positions; infinite where a logit is not a number.
    """

    worst: float
    typical: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Distance:
        """From one greatest difference a position; 0 and 0 for none."""
        return cls(max(values), median(values)) if values else cls(0.0, 0.0)

    def or_worse(self, other: Distance) -> Distance:
        """The greater of both, worst and typical each."""
        return Distance(max(self.worst, other.worst), max(self.typical, other.typical))


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding does to this model, by transformers' own two passes.

    Attributes:
        own: transformers' pass in the model's dtype from its pass in finer arithmetic.
        floor: one rounding of a logit of ordinary size, eps(dtype) · standard deviation of the logits: no
            pass is trusted to be nearer than this, however near transformers' happened to be.
        margin: how many times further than transformers' a pass may be.
    """

    own: Distance
    floor: float
    margin: float

    @property
    def unit(self) -> float:
        """The rounding error of a logit, at worst."""
        return max(self.own.worst, self.floor)

    @property
    def allowed(self) -> Distance:
        """The greatest distance from the reference at which a pass may still compute the same."""
        return Distance(
            self.margin * max(self.own.worst, self.floor), self.margin * max(self.own.typical, self.floor)
        )

    def explains(self, distance: Distance) -> bool:
        """Whether rounding alone can carry a pass that far; never where something is not a number."""
        finite = max(distance.worst, self.own.worst, self.floor) < float("inf")
        return finite and distance.worst <= self.allowed.worst and distance.typical <= self.allowed.typical


class _Finer(TorchFunctionMode):
    """Every torch function sees tensors of one dtype as tensors of a finer one.

    The model itself stays as it is and is not copied: weights are converted for each operation that reads
    them, so the memory needed is that of one converted weight.
    """

    def __init__(self, low: torch.dtype, high: torch.dtype) -> None:
        super().__init__()
        self.low, self.high = low, high

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute; only the dtype is another one
            found = func(*args, **(kwargs or {}))
            return self.high if found is self.low else found
        if func is torch.Tensor.float and self.low is torch.float32:
            func = torch.Tensor.double
        return func(*tree_map(self._finer, args), **tree_map(self._finer, kwargs or {}))

    def _finer(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == self.low:
            return value.to(self.high)
        return self.high if value is self.low else value


@torch.inference_mode()
def reference_rows(llm: LLM, text: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits at some places of a text, by transformers' own code, the whole text in one pass.

    Where the target multiplies int8, transformers' layers are given what these stand for; where its
    keys and values are int8, so is the reference's attention.

    Returns:
        (m, V) in the model's dtype's arithmetic, and (m, V) in the next finer one (float32 for half
        precision, float64 for float32), the reference proper.
    """
    model = llm.model
    if llm.source.scaling is not None or llm.target.keys == torch.int8:
        model = shared_copy(model, rotary_of(model, llm.source.scaling))
    if llm.target.keys == torch.int8:
        model.config._attn_implementation = ATTENTION
    low = next(p.dtype for p in model.parameters() if p.is_floating_point())
    high = torch.float32 if low in (torch.bfloat16, torch.float16) else torch.float64
    ids = torch.tensor([list(text)], device=llm.target.device)
    keep = torch.tensor(list(places), device=llm.target.device)
    with _whole_numbers(model) if llm.target.whole else ExitStack():
        own = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
        with _Finer(low, high):
            finer = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
    return own.to(high), finer


@contextmanager
def _whole_numbers(model: torch.nn.Module) -> Iterator[None]:
    """What enters a linear layer is rounded to groups of int8 while the context lasts."""

    def rounded(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        return (quantized(args[0]).to(args[0].dtype),)

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                hooks.callback(layer.register_forward_pre_hook(rounded).remove)
        yield


def _rounded(rows: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """Integers up to ``most`` and the scale (…, 1) of each row (…, d)."""
    scale = rows.abs().amax(-1, keepdim=True) / most
    return torch.where(scale > 0, rows / scale, 0.0).round(), scale


def _powers(x: Tensor) -> Tensor:
    """127 · 2^x for x up to 0, by the polynomial of docs/exactness.md."""
    x = x.clamp_min(-100.0)
    turns = x.round()
    r = x - turns
    return (127 + r * (88.0469360 + r * (30.7607937 + r * 6.98612738))) * turns.exp2()


def _int8_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over int8 queries, keys, values and probabilities, as docs/exactness.md specifies it, for a
    whole text: (1, H, n, d) × (1, K, n, d) → (1, n, H, d)."""
    heads, n, width = query.shape[1:]
    factor = width**-0.5 if scaling is None else scaling
    at = torch.arange(n, device=query.device)
    behind = at[:, None] - at
    seen = (behind >= 0) & (behind < (sliding_window or n))
    group = heads // key.shape[1]
    queries, query_scales = _rounded(query[0].unflatten(0, (-1, group)))  # (K, g, n, d)
    keys, key_scales = (part[:, None] for part in _rounded(key[0]))
    values, value_scales = (part[:, None] for part in _rounded(value[0]))
    scales = value_scales.where(value_scales > 0, 2.0**-64).transpose(-1, -2)  # (K, 1, 1, n)
    factors = key_scales.transpose(-1, -2) * (query_scales * (factor * math.log2(math.e)))
    scores = (queries @ keys.transpose(-1, -2) * factors + scales.log2()).masked_fill(~seen, float("-inf"))
    best = scores.amax(-1, keepdim=True)
    total, whole = torch.zeros_like(queries), torch.zeros_like(best)
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        top = scores[..., part].amax(-1, keepdim=True)
        weights = _powers(scores[..., part] - top.where(top.isfinite(), 0.0)) * seen[:, part]
        share = (top - best).exp2()
        total = total + share * (weights.round() @ values[..., part, :])
        whole = whole + share * (weights / scales[..., part]).sum(-1, keepdim=True)
    out = total / whole
    return out.flatten(0, 1).transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, _int8_attention)


def measure_rounding(llm: LLM, text: Sequence[int], places: Sequence[int]) -> tuple[Rounding, Tensor]:
    """What rounding does to a model over a text; the reference's rows (m, V) at ``places`` besides.

    The last :data:`FEWEST` places of the text are always looked at, so that a text of few new tokens
    does not rest on one or two positions.
    """
    more = range(max(0, len(text) - FEWEST), len(text))
    own, finer = reference_rows(llm, text, [*places, *more])
    dtype = llm.target.dtype
    distances = [far(a, b) for a, b in zip(own, finer, strict=True)]
    floor = torch.finfo(dtype).eps * float(finer.std()) if finer.isfinite().all() else float("inf")
    rounds = llm.target.whole or llm.target.keys == torch.int8
    margin = MARGIN_HALF if rounds else MARGIN.get(dtype, MARGIN_HALF)
    found = Rounding(Distance.over(distances), floor, margin)
    return found, finer[: len(places)]


def far(one: Tensor, other: Tensor) -> float:
    """Greatest absolute difference of a logit, of tokens that are left out aside; infinite where either holds
    NaN."""
    other = other.to(one.device)
    chosen = (one != -torch.inf) & (other != -torch.inf)
    furthest = float((one.double() - other.double())[chosen].abs().max())
    return furthest if furthest == furthest else float("inf")
