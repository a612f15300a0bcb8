"""The drafter that a model's own files bring (MTP, multi-token prediction), on the kernels of its
target.

Its row at position t reads the target's normed last state at t and the embedding of the token at
t + 1, each normed once more and joined by one product; one decoder layer and a norm follow, and the
target's LM head gives the token at t + 2. Drafted rows read the layer's own *normed* output in the
place of the target's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.batch import LayerPass
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import Shape, active_type
from tokenswift.kv.cache import FullCache
from tokenswift.loader.drafting import EMBEDDING_NORM, JOIN, STATE_NORM
from tokenswift.loader.layout import NORM
from tokenswift.loader.rotary import AngleTable
from tokenswift.loader.weights import Weights, unstored
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.packing import Packing
from tokenswift.sampling.rows import Subset
from tokenswift.speculation.eagle.features import Features
from tokenswift.speculation.eagle.model import (
    CHUNK,
    SCRATCH,
    WINDOW,
    EagleModel,
    drafted_rows,
    halves,
)

#: of a vocabulary of more than four times as many tokens, the first so many are drafted: those that
#: its tokenizer merged first, which are the frequent ones
DRAFTED = 1 << 15


class MtpModel:
    """A model's own drafter. Threads may share it.

    Args:
        weights: of its layer (`weights.drafting_weights`).
        target: the model.

    Attributes:
        name: what it is called in records.
        title: what it is called in sentences.
        noise: weight of the target's noise in its drafts.
        window: newest keys that a token sees, itself included.
        subset: tokens that the columns of logits stand for; None: token ids.
        weight_bytes: bytes of weights that a pass reads.
    """

    name = "mtp"
    title = "the model's own drafter (MTP)"
    noise = 1.0
    window = WINDOW

    def __init__(self, weights: Weights, target: NativeTarget) -> None:
        self.target = target
        self.backend = target.backend
        self._dtype = torch.float32 if target.int8 else target.dtype
        self._eps = weights.layout.eps
        self._angles = AngleTable(target.rotary)
        packing = Packing(weights, weights.layout, target.dtype, self.backend)
        layer = packing.layer(0)
        layer.window = self.window
        self._embedding_norm = packing.norm_weight(EMBEDDING_NORM)
        self._state_norm = packing.norm_weight(STATE_NORM)
        self._final_norm = packing.norm_weight(NORM)
        join = weights.get(JOIN)
        if join is None:
            raise ValueError(f"the weights lack {JOIN}")
        embeds, states = halves(join, target.hidden_size)
        self._join_embeds = self._matrix(embeds)
        self._join_states = self._matrix(states)
        self.subset: Subset | None = None
        self._head_rows = None
        if target.vocab_size > 4 * DRAFTED:
            ids = torch.arange(DRAFTED, device=target.device)
            self.subset = Subset(ids, target.vocab_size)
            self._head_rows = target.head_rows(ids)
        head = target.head.nbytes
        if self.subset is not None:
            head = head * DRAFTED // target.vocab_size
        read = [*layer.packed(), self._join_embeds, self._join_states]
        self.weight_bytes = sum(weight.nbytes for weight in read) + head
        mixture = weights.layout.mixture
        if layer.experts is not None and mixture is not None:  # a row goes through few of them
            expert_bytes = sum(weight.nbytes for weight in layer.experts.packed())
            self.weight_bytes -= round(expert_bytes * (1 - mixture.used / mixture.experts))
        stored = all(weight.stored for weight in layer.packed())
        self.shape = _shape(weights, target, self._dtype, stored)
        self._body = self.backend.body(self.shape, [layer])

    def _matrix(self, weight: Tensor | Stored) -> Packed:
        if isinstance(weight, Stored) and self.backend.formats:
            return self.backend.pack(weight, self._dtype)
        dense = unstored(weight, self._dtype).contiguous()
        return self.backend.pack_for_drafts(dense.to(self.target.device), self.target.int8)

    # ---- what a text has -------------------------------------------------------------------------

    def new_cache(self) -> FullCache:
        """Room for the keys and values of a window, of a pass's rows behind them, and of drafted
        rows."""
        return self._cache(self.window + CHUNK + SCRATCH)

    def _cache(self, capacity: int) -> FullCache:
        return self.backend.new_cache(
            layers=1,
            kv_heads=self.shape.kv_heads,
            width=self.shape.width,
            capacity=capacity,
            dtype=self._dtype,
        )

    def features(self) -> Features:
        """What keeps a text's states until they are read."""
        return Features(self.window)

    @property
    def nbytes(self) -> int:
        """Bytes that a text holds: the cache and, before they are read, states of a window."""
        cache_row = self._cache(16).nbytes // 16
        state_row = 4 * self.target.hidden_size
        return (self.window + CHUNK + SCRATCH) * cache_row + self.window * state_row

    # ---- passes ----------------------------------------------------------------------------------

    def _normed(self, states: Tensor, weight: Tensor) -> Float[Tensor, "n D"]:
        return self.backend.norm(states.contiguous(), weight, self._eps, torch.float32)

    @torch.inference_mode()
    def fuse(self, features: Float[Tensor, "1 n D"]) -> Float[Tensor, "n D"]:
        """What the layer reads of the target's last states, which come before its final norm."""
        return self._entering(self.target.norm(features[0].contiguous(), torch.float32))

    @torch.inference_mode()
    def fed_back(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """What the next rows read of the states that :meth:`run` returned."""
        return self._entering(self._normed(states, self._final_norm))

    def _entering(self, normed: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        rows = self._normed(normed, self._state_norm)
        return self.backend.draft_product(rows.to(self._dtype), self._join_states)

    @torch.inference_mode()
    def run(
        self,
        tokens: list[int] | Int[Tensor, " n"],
        states: Float[Tensor, "n D"],
        start: int,
        cache: FullCache,
        parents: Sequence[int] | None = None,
    ) -> Float[Tensor, "n D"]:
        """A pass over rows, as `EagleModel.run`."""
        count = len(tokens)
        segment = drafted_rows(tokens, start, cache, parents)
        batch = self.backend.batch([segment], self.shape)
        embeds = self._normed(self.target.embed(batch.tokens).float(), self._embedding_norm)
        rows = self.backend.draft_product(embeds.to(self._dtype), self._join_embeds)
        rows[:count] += states
        cos, sin = self._angles.at(batch.positions)
        layer_pass = LayerPass(batch=batch, states=rows, cos=cos, sin=sin, keep_queries=False)
        self.backend.layers(self._body, layer_pass)
        return rows[:count]

    @torch.inference_mode()
    def logits(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n S"]:
        """Logits of the tokens behind those that rows were run with, from the states that
        :meth:`run` returned; a column for each token of :attr:`subset`."""
        normed = self.backend.norm(states, self._final_norm, self._eps, self._dtype)
        return self.target.project(normed, self._head_rows)


def _shape(weights: Weights, target: NativeTarget, keys: torch.dtype, stored: bool) -> Shape:
    """The sizes of a pass, whose keys are of a type."""
    layout = weights.layout
    return Shape(
        layers=1,
        hidden=layout.hidden_size,
        inner=layout.intermediate_size,
        heads=layout.num_attention_heads,
        kv_heads=layout.num_key_value_heads,
        width=layout.head_dim,
        weights=target.dtype,
        keys=keys,
        active=torch.int8 if target.int8 and stored else active_type(target.dtype),
        eps=layout.eps,
        scale=layout.scale,
        mixture=layout.mixture,
    )


#: a drafter that reads features of its target's passes
FeatureModel: TypeAlias = EagleModel | MtpModel
