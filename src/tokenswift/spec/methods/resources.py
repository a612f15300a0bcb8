"""What strategies are made from."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tokenswift.interfaces import DraftModel, LowBit
from tokenswift.spec.adaptive.cost import Table
from tokenswift.spec.heads.modules import Heads


class Resources(Protocol):
    """What strategies take from the ``LLM``."""

    target: Any
    heads: Heads | None

    def heads_of(self, kind: str) -> Heads | None:
        """Heads of a kind, if there are any for this model."""
        ...

    def costs(self, low: LowBit | None = None) -> Table:
        """Measured times of passes, of quantized ones too where there are any."""
        ...

    def learn_costs(self, table: Table, low: LowBit | None = None) -> None:
        """Take these times as a run has corrected them."""
        ...

    def low_bit(self, wanted: str) -> LowBit | None:
        """The quantized target, as a strategy's option says; InputError where it cannot be had."""
        ...

    def draft_name(self, wanted: Any) -> str:
        """The name of a draft model."""
        ...

    def draft_model(self, wanted: Any) -> DraftModel:
        """A draft model by name, or the one that goes with the default model; InputError if none fits."""
        ...


def frequent(llm: Resources) -> Tensor | None:
    """Token ids that a draft model may draft besides the prompt's: those that the heads name; None: all."""
    return None if llm.heads is None else llm.heads.frequent
