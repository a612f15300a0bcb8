"""Weights stored otherwise than their files hold them: ``--weights``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.loader.checkpoint import StoredWeights, unstored
from tokenswift.types import InputError


class Recoded:
    """Weights of a model's files, its matrices stored otherwise (implements `checkpoint.StoredWeights`).

    Args:
        weights: of the files.
        kind: one of `load.WEIGHTS`, but for "stored".
    """

    def __init__(self, weights: StoredWeights, kind: str) -> None:
        self._weights, self._kind = weights, kind
        self.layout, self.copies = weights.layout, weights.copies
        self.dtype, self.device = weights.dtype, weights.device

    def names(self) -> list[str]:
        """The names of all tensors, in order."""
        return self._weights.names()

    def get(self, name: str) -> Tensor | Stored | None:
        """See `checkpoint.Weights`."""
        found = self._weights.get(name)
        if found is None or len(found.shape) != 2:
            return found
        if self._kind not in FORMATS:
            return unstored(found, getattr(torch, self._kind))
        format = FORMATS[self._kind]
        if isinstance(found, Stored) and found.format is format:
            return found
        if found.shape[1] % format.block:
            raise InputError(
                f"weights is {self._kind!r}, but {name} has {found.shape[1]} columns; valid: a model whose "
                f"columns are a multiple of {format.block}, or stored"
            )
        assert format.encode is not None
        return Stored(format, format.encode(unstored(found, torch.float32)))

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """See `checkpoint.Weights`."""

    def rest(self) -> None:
        """See `checkpoint.Weights`."""
        self._weights.rest()

    def done(self) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
        """See `checkpoint.Weights`."""
        return self._weights.done()
