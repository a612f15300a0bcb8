"""The quantized target: what it drafts for itself with, at a fraction of a step's price.

Weights of 4 or 8 bits times activations of 8 bits (groups of 32 in int8 with a scale), over the same
caches, positions and embeddings as the target. Where the target's own weights are stored quantized they are
used as they are; otherwise a copy is made. Quantized self-drafting follows QuantSpec (Tiwari et al. 2025) and
ML-SpecQD (2025); that drafts never change the text is the acceptance rule's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.inference import inference
from tokenswift.interfaces import KVCache, Pass, Segment
from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats.format import Format, Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.weights import PRODUCTS, LayerWeights, Packed
from tokenswift.kv.pages import Arena
from tokenswift.models.decoder import NativeTarget
from tokenswift.types import InputError


class LowBitTarget:
    """Passes of a quantized target. Threads may share it.

    Args:
        target: the model; it stays as it is.
        form: format of the copy, for weights that are not stored quantized; see :func:`low_bit`.

    Attributes:
        copied_bytes: what the copy takes; 0 where the target's own weights serve.
        weight_bytes: bytes of weights that one pass reads.
        device: the target's.
    """

    def __init__(self, target: NativeTarget, form: Format) -> None:
        self._target = target
        self.device, self.copied_bytes = target.device, 0
        body, backend = target.body, target.backend
        self._arena = Arena()
        weights = [self._layer(layer, backend, form) for layer in body.weights]
        self._head = self._low(target.head, backend, form)
        del self._arena
        self._body = backend.body(replace(body.shape, active=torch.int8, weights=torch.float32), weights)
        packed = [self._head, *(weight for layer in weights for weight in layer.packed())]
        self.weight_bytes = sum(weight.nbytes for weight in packed)

    def _layer(self, layer: LayerWeights, backend: Backend, form: Format) -> LayerWeights:
        return replace(layer, **{name: self._low(getattr(layer, name), backend, form) for name in PRODUCTS})

    def _low(self, weight: Packed, backend: Backend, form: Format) -> Packed:
        if weight.stored or form.encode is None:
            return weight
        made = backend.pack(Stored(form, form.encode(weight.unpack().float())), arena=self._arena)
        self.copied_bytes += made.nbytes
        return made

    @inference
    def forward(
        self,
        tokens: Int[Tensor, " n"],
        positions: Int[Tensor, " n"],
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        """Run n tokens over a cache (see `interfaces.TargetModel`); their entries go to its scratch."""
        return self._target.run([Segment(tokens, positions, cache, parents)], keep=False, body=self._body)[0]

    @inference
    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Final norm and LM head; float32."""
        replays = self._target.replays
        return self._scored(hidden) if replays is None else replays.rows(self._body, self._scored, hidden)

    def _scored(self, hidden: Tensor) -> Tensor:
        normed = self._target.norm(hidden, torch.float32)
        return self._target.backend.linear(normed, self._head, self._target.head_bias, torch.int8)


def low_bit(target: object, wanted: str) -> LowBitTarget | None:
    """A quantized target; what a copy takes is added to the target's ``copied_bytes``.

    Args:
        wanted: format of a copy of weights that are not stored quantized; "auto": q8_0, where half of the
            free memory holds it; "none": nothing.
    Returns:
        None where "auto" finds none.
    Raises:
        InputError: the model cannot be had in that format, or the memory does not hold it.
    """
    if wanted == "none":
        return None
    form = FORMATS["q8_0" if wanted == "auto" else wanted]
    if wanted == "auto" and isinstance(target, NativeTarget) and target.whole:
        return None  # its own passes are such
    if not isinstance(target, NativeTarget) or not _quantisable(target, form):
        if wanted == "auto":
            return None
        raise InputError(
            f"draft_weights is {wanted!r}, and this model cannot be quantized here; valid: auto or none "
            f"(its kernels are torch's, or a width is no multiple of {form.block})",
            "draft_weights",
        )
    needed, memory = copy_bytes(target, form), target.backend.memory()
    free = needed if memory is None else memory.free
    if wanted == "auto" and 2 * needed > free:
        return None
    if needed > free:
        raise InputError(
            f"draft_weights is {wanted!r}: a copy takes {needed:,} bytes, and {free:,} are available; "
            "valid: a smaller format, or none",
            "draft_weights",
        )
    made = LowBitTarget(target, form)
    target.copied_bytes += made.copied_bytes
    return made


def _quantisable(target: NativeTarget, form: Format) -> bool:
    """Whether blocks divide the widths of a native decoder whose backend takes them."""
    shape = target.body.shape
    widths = (shape.hidden, shape.inner, shape.heads * shape.width)
    return (
        form.name in target.backend.formats
        and form.encode is not None
        and all(w % form.block == 0 for w in widths)
    )


def copy_bytes(target: NativeTarget, form: Format) -> int:
    """Bytes that a copy of the weights would take that are not quantized yet."""
    return sum(weight.rows * form.row_bytes(weight.columns) for weight in _dense(target))


def savings(target: object) -> dict[str, int]:
    """Bytes that a model would take less with its quantized weights, by format."""
    if not isinstance(target, NativeTarget):
        return {}
    held = sum(weight.nbytes for weight in _dense(target))
    forms = [form for form in FORMATS.values() if _quantisable(target, form)] if held else []
    return {form.name: held - copy_bytes(target, form) for form in forms}


def _dense(target: NativeTarget) -> list[Packed]:
    """Weights that are not quantized."""
    packed = [target.head, *(weight for layer in target.body.weights for weight in layer.packed())]
    return [weight for weight in packed if not weight.stored]
