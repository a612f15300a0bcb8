"""The target in few bits: what it drafts for itself with, at a fraction of a step's price.

Weights of 4 or 8 bits times activations of 8 bits (groups of 32 whole numbers with a scale), over the same
caches, positions and embeddings as the target. Where the target's own weights are stored in few bits they are
used as they are; otherwise a copy is made. Quantised self-drafting follows QuantSpec (Tiwari et al. 2025) and
ML-SpecQD (2025); that drafts never change the text is the acceptance rule's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.backends.base import Backend
from tokenswift.backends.weights import LayerWeights, Packed
from tokenswift.interfaces import KVCache, Pass, Segment
from tokenswift.models.decoder import LeanTarget
from tokenswift.weights.format import Format, Stored

_WEIGHTS = ("qkv", "out", "gate_up", "down")


class LowBitTarget:
    """Passes of a target in few bits. Threads may share it.

    Args:
        target: the model; it stays as it is.
        form: format of the copy, for weights that are not stored in few bits; see :func:`quantisable`.

    Attributes:
        copied_bytes: what the copy takes; 0 where the target's own weights serve.
        weight_bytes: bytes of weights that one pass reads.
        device, kv_bytes, vocab_size: the target's.
    """

    def __init__(self, target: LeanTarget, form: Format) -> None:
        self._target = target
        self.device, self.kv_bytes, self.vocab_size = target.device, target.kv_bytes, target.vocab_size
        self.copied_bytes = 0
        body, backend = target.body, target.backend
        weights = [self._layer(layer, backend, form) for layer in body.weights]
        self._head = self._low(target.head, backend, form)
        self._body = backend.body(replace(body.shape, active=torch.int8, weights=torch.float32), weights)
        self.weight_bytes = self._head.nbytes + sum(
            getattr(layer, name).nbytes for layer in weights for name in _WEIGHTS
        )

    def _layer(self, layer: LayerWeights, backend: Backend, form: Format) -> LayerWeights:
        return replace(layer, **{name: self._low(getattr(layer, name), backend, form) for name in _WEIGHTS})

    def _low(self, weight: Packed, backend: Backend, form: Format) -> Packed:
        if weight.stored or form.encode is None:
            return weight
        made = backend.pack(Stored(form, form.encode(weight.unpack().float())))
        self.copied_bytes += made.nbytes
        return made

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, " n"],
        positions: Int[Tensor, " n"],
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        """Run n tokens over a cache (see `interfaces.TargetModel`); their entries go to its scratch."""
        return self._target.run([Segment(tokens, positions, cache, parents)], keep=False, body=self._body)[0]

    @torch.inference_mode()
    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Final norm and LM head; float32."""
        normed = self._target.norm(hidden, torch.float32)
        return self._target.backend.linear(normed, self._head, self._target.head_bias, torch.int8)


def quantisable(target: object, form: Format) -> bool:
    """Whether a target can be had in few bits: a lean decoder on panels, of widths that blocks divide."""
    if not isinstance(target, LeanTarget) or not target.backend.panels or form.encode is None:
        return False
    shape = target.body.shape
    widths = (shape.hidden, shape.inner, shape.heads * shape.width)
    return shape.weights != torch.float16 and all(width % form.block == 0 for width in widths)


def copy_bytes(target: LeanTarget, form: Format) -> int:
    """Bytes that a copy of the weights would take that are not in few bits yet."""
    layers = [getattr(layer, name) for layer in target.body.weights for name in _WEIGHTS]
    dense = [weight for weight in (*layers, target.head) if not weight.stored]
    return sum(weight.rows * form.row_bytes(weight.columns) for weight in dense)
