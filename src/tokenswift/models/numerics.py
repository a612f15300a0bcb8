"""Measures against near-ties: how a pass is computed so that its shape matters less.

The same position is computed by passes of different shapes: one row in plain decoding, some forty rows in
tree decoding. Kernels add up in another order then, and a rounded score may flip a near-tie. None of
these measures changes what is promised; they change how often rounding is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenswift.config import check_choice


@dataclass(frozen=True, slots=True)
class Numerics:
    """How passes over the full cache are computed.

    Attributes:
        block: matrix products with weights run in blocks of exactly this many rows (the last one is
            filled up), so that a row's result does not depend on how many others there are; 0: all rows
            of a pass at once, by whatever kernel suits their number.
        attention: dtype of attention (queries, keys, values, weights); None: the model's. The order in
            which keys are added up depends on the pass; in float64 the difference (1e-16) all but never
            survives the rounding to the model's dtype, in float32 (1e-7) it does somewhere in most passes.
        head_float32: final norm and LM head in float32.
    """

    block: int = 0
    attention: torch.dtype | None = None
    head_float32: bool = False

    def products(self) -> AbstractContextManager[object]:
        """A context in which matrix products with weights follow :attr:`block`."""
        return _Blocks(self.block) if self.block else nullcontext()


class _Blocks(TorchFunctionMode):
    """Runs every ``F.linear`` in blocks of a fixed number of rows."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        rows: Tensor = args[0].reshape(-1, args[0].shape[-1])
        count = len(rows)
        rows = F.pad(rows, (0, 0, 0, -count % self.block))
        made = [F.linear(part, *args[1:], **kwargs) for part in rows.split(self.block)]
        whole = made[0] if len(made) == 1 else torch.cat(made)
        return whole[:count].reshape(*args[0].shape[:-1], -1)


#: Names for users; what "stable" holds was chosen by measurement (docs/exactness.md).
PRESETS: dict[str, Numerics] = {
    "default": Numerics(),
    "stable": Numerics(block=16, attention=torch.float64),
}


def parse_numerics(name: str | Numerics) -> Numerics:
    """The measures behind a name.

    Raises:
        InputError: an unknown name.
    """
    if isinstance(name, Numerics):
        return name
    check_choice("numerics", name, tuple(PRESETS))
    return PRESETS[name]
