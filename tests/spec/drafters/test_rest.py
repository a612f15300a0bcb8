"""Steps that ask no drafter: none of the text is lost to those that rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenswift import LLM
from tokenswift.spec import control
from tokenswift.spec.adaptive import ByChance


@pytest.mark.parametrize("dear", [-1.0, 1e9])
def test_drafters_rest_and_read_on(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dear: float
) -> None:
    """After a while without drafts some steps ask nobody, where asking is dear; every token is read once."""
    monkeypatch.setattr(control, "_IDLE", 4)
    monkeypatch.setattr(control, "_DEAR", dear)
    asked, heard, begin = [0], list[int](), ByChance.begin

    def begun(self: ByChance, sequence: Any) -> None:
        begin(self, sequence)
        (lookup,) = (drafter for drafter in self.drafters if drafter.name == "lookup")
        propose, observe = lookup.propose, lookup.observe

        def counted(*args: Any) -> None:
            asked[0] += 1
            propose(*args)

        def noted(sequence: Any, outcome: Any) -> None:
            heard.extend(outcome.tokens)
            observe(sequence, outcome)

        monkeypatch.setattr(lookup, "propose", counted)
        monkeypatch.setattr(lookup, "observe", noted)

    monkeypatch.setattr(ByChance, "begin", begun)
    llm = LLM(tiny_folder("llama"), dtype="float32")
    done = llm.generate([5, 9, 30, 7], 120, temperature=1.5, ignore_eos=True, seed=3)
    plain = llm.generate([5, 9, 30, 7], 120, "autoregressive", temperature=1.5, ignore_eos=True, seed=3)
    assert done.token_ids == plain.token_ids
    steps = done.metrics.steps
    assert asked[0] < steps / 2 if dear < 0 else asked[0] > steps / 2
    assert done.token_ids[: len(heard)] == heard and len(heard) >= 120 - control._LONG_REST
