"""Adaptive drafting by prices and modes that a test sets, whatever the clock says."""

from __future__ import annotations

from typing import Protocol

import pytest

from tokenswift.speculation.control import Control
from tokenswift.speculation.costs import Costs
from tokenswift.speculation.sequence_state import ALONE, BatchLoad


def fix_prices(monkeypatch: pytest.MonkeyPatch, row: float = 1e-6) -> None:
    """A row of a pass costs so many plain passes, and drafting nothing."""
    monkeypatch.setattr(Costs, "verify", lambda self, rows: 1 + row * (rows - 1))
    monkeypatch.setattr(Costs, "observe", lambda *args: None)


class Choice(Protocol):
    """What stands in for `Control.choose_mode`."""

    def __call__(self, control: Control, context: int, load: BatchLoad = ALONE) -> str: ...


def always(name: str, rate: float = 1.0) -> Choice:
    """`Control.choose_mode` for a drafter that drafts in every step."""

    def mode(control: Control, context: int, load: BatchLoad = ALONE) -> str:
        control._step += 1
        control.timing_plain = False
        control.row_cost = 1e-6
        control.level_cost = 1e-6
        control.load = load
        for each in control.modes.values():
            each.pass_cost = min(each.pass_cost, 1e-6)
            each.draft_cost = 0.0
        control.current = name
        control.tokens_per_pass = rate
        return name

    return mode
