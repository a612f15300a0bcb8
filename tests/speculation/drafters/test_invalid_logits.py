"""Drafts that hold NaN end no run and change no token: they have no candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.speculation.drafters.prices import always, fix_prices
from tests.speculation.drafters.scripted import prompt, scripted_heads, scripted_model
from tests.speculation.drafters.test_accepted import GREEDY, NOISY, PROMPT, SMALL
from tokenswift import LLM, InputError, RunError, SamplingParams
from tokenswift.kv.cache import KVCache
from tokenswift.kv.passes import Pass
from tokenswift.kv.sparse import SparseCache
from tokenswift.models.decoder import NativeTarget
from tokenswift.speculation.control import Control
from tokenswift.speculation.drafters.draft_model import MODEL, ModelContext
from tokenswift.speculation.drafters.heads import HIDDEN
from tokenswift.speculation.drafters.partial import PARTIAL

NEW = 60
TREE = {"tree": (2, 1, 2, 1), "ngrams": 2}
TRIFORCE = {"gamma": 5, "inner_gamma": 2, "chunk": 2, "budget": 24, "sinks": 2, "draft_budget": 16}
#: strategies that draft with heads
OF_HEADS: list[tuple[str, dict[str, Any]]] = [
    ("tokenswift", {"draft": "hidden", **TREE}),
    ("tokenswift", {"draft": "partial", **TREE, **SMALL}),
    ("auto", {"draft": "hidden", "ngrams": 0}),
    ("auto", {"draft": "partial", **SMALL}),
]
#: strategies that run a draft model
OF_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("auto", {"ngrams": 0, "draft": "hidden"}),
    ("magicdec", {"gamma": 3, "kv": "streaming", **SMALL, "budget": 16}),
    ("triforce", TRIFORCE),
]
#: strategies that run the target over a partial cache
OF_PASSES: list[tuple[str, dict[str, Any]]] = [
    ("tokenswift", {"draft": "partial", **TREE, **SMALL}),
    ("auto", {"draft": "partial", **SMALL}),
    ("magicdec", {"gamma": 3, "kv": "snapkv", **SMALL}),
    ("magicdec", {"gamma": 3, "kv": "streaming", **SMALL}),
    ("triforce", TRIFORCE),
]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In adaptive drafting everything pays."""
    fix_prices(monkeypatch)


def equal_to_plain(
    llm: LLM, strategy: str, options: dict[str, Any], params: SamplingParams
) -> None:
    plain = llm.generate(prompt(PROMPT), NEW, "autoregressive", sampling=params)
    drafted = llm.generate(prompt(PROMPT), NEW, strategy, options, params)
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("kind", "first"),
    [("linear", 0), ("linear", 2), ("conditioned", 0), ("medusa", 0), ("medusa", 2)],
)
def test_heads(kind: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first level on, or from a later one."""
    llm = LLM.from_model(scripted_model(False), heads=scripted_heads(kind))
    heads = llm.resources.heads
    assert heads is not None
    for layer in list(heads.layers)[first:]:
        for parameter in layer.parameters():
            parameter.data.fill_(torch.nan)
    for strategy, options in [*OF_HEADS, *[("medusa", {"tree": (2, 1, 2)})] * (kind == "medusa")]:
        with monkeypatch.context() as patch:
            if strategy == "auto":
                patch.setattr(
                    Control,
                    "choose_mode",
                    always(HIDDEN if options["draft"] == "hidden" else PARTIAL),
                )
            equal_to_plain(llm, strategy, options, NOISY)


@pytest.mark.parametrize("late", [0, 6])
@pytest.mark.parametrize(
    ("models", "strategy", "options"),
    [*((True, *run) for run in OF_MODELS), *((False, *run) for run in OF_PASSES)],
)
def test_passes(
    models: bool,
    strategy: str,
    options: dict[str, object],
    late: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a draft model, or over a partial cache, that give NaN from the first or from a later one
    on."""
    llm = LLM.from_model(scripted_model(), heads=None if models else scripted_heads("linear"))
    passes = 0
    real_row = ModelContext.row
    real_forward = NativeTarget.forward

    def factor() -> float:
        nonlocal passes
        passes += 1
        return 1.0 if passes <= late else torch.nan

    def row(self: ModelContext, text: list[int], ahead: Sequence[int]) -> Tensor:
        return real_row(self, text, ahead) * factor()

    def forward(
        self: NativeTarget,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        result = real_forward(self, tokens, positions, cache, parents)
        if self is not llm.target or not isinstance(cache, SparseCache):
            return result
        return replace(result, hidden=result.hidden * factor())

    if models:
        monkeypatch.setattr(ModelContext, "row", row)
    else:
        monkeypatch.setattr(NativeTarget, "forward", forward)
    if strategy == "auto":
        monkeypatch.setattr(Control, "choose_mode", always(MODEL if models else PARTIAL))
    if models or strategy == "triforce":
        options = {**options, "draft_model": scripted_model()}
    equal_to_plain(llm, strategy, options, GREEDY if models else NOISY)
    assert passes > late


def test_the_targets_own_nan_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(scripted_model(), heads=scripted_heads("linear"))
    real = type(llm.target).logits

    def logits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return real(self, hidden) * (torch.nan if self is llm.target else 1.0)

    monkeypatch.setattr(type(llm.target), "logits", logits)
    for strategy, options in [("autoregressive", {}), *OF_HEADS, *OF_MODELS[1:], *OF_PASSES]:
        if strategy == "triforce":
            options = {**options, "draft_model": scripted_model()}
        with pytest.raises(RunError, match="the model's logits for position 50 hold NaN"):
            llm.generate(prompt(PROMPT), NEW, strategy, options, GREEDY)


def test_a_draft_model_without_numbers_is_named_when_it_is_loaded() -> None:
    """NaN in its weights: one line that speaks of the draft model, not of the model."""
    draft = scripted_model()
    draft.lm_head.weight.data[:] = torch.nan
    llm = LLM.from_model(scripted_model(), heads=None)
    with pytest.raises(InputError, match=r"^draft_model [^\n]*NaN"):
        llm.generate([1, 2, 3], 4, "magicdec", {"draft_model": draft})
