"""Adaptive drafting by prices and modes that a test sets, whatever the clock says."""

from __future__ import annotations

from typing import Any

import pytest

from tokenswift.speculation.control import Control
from tokenswift.speculation.costs import Costs
from tokenswift.speculation.sequence_state import ALONE, BatchLoad


def fix_prices(monkeypatch: pytest.MonkeyPatch, row: float = 1e-6) -> None:
    """A row of a pass costs so many plain passes, and drafting nothing."""
    monkeypatch.setattr(Costs, "verify", lambda self, rows: 1 + row * (rows - 1))
    monkeypatch.setattr(Costs, "observe", lambda *args: None)


def always(name: str, rate: float = 1.0) -> Any:
    """`Control.mode` for a drafter that drafts in every step."""

    def mode(self: Control, context: int, load: BatchLoad = ALONE) -> str:
        self._step += 1
        self.timing_plain, self.row, self.level, self.load = False, 1e-6, 1e-6, load
        for known in self.modes.values():
            known.pass_cost, known.draft = min(known.pass_cost, 1e-6), 0.0
        self.current, self.tokens_per_pass = name, rate
        return name

    return mode
