"""Drafts that hold NaN end no run and change no token: no candidates, one line, the source is left out."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.spec.drafters.prices import always, fix_prices
from tests.spec.drafters.scripted import prompt, scripted_heads, scripted_model
from tests.spec.drafters.test_accepted import GREEDY, NOISY, PROMPT, SMALL
from tokenswift import LLM, InputError, RunError, SamplingParams
from tokenswift.kv.sparse import SparseCache
from tokenswift.models.decoder import NativeTarget
from tokenswift.spec.control import Control
from tokenswift.spec.drafters.heads import HIDDEN, HeadLevels
from tokenswift.spec.drafters.passes import MODEL, PARTIAL, ModelContext
from tokenswift.spec.heads.modules import Heads
from tokenswift.spec.strategy import ALONE, BatchLoad

SAMPLINGS = {"greedy": GREEDY, "noisy": NOISY}
NEW = 60
TREE = {"tree": (2, 1, 2, 1), "ngrams": 2}
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
    ("magicdec", {"gamma": 3, "kv": "snapkv", **SMALL}),
    ("magicdec", {"gamma": 3, "kv": "streaming", **SMALL, "budget": 16}),
    ("triforce", {"gamma": 5, "inner_gamma": 2, "chunk": 2, "budget": 24, "sinks": 2, "draft_budget": 16}),
]
#: strategies that run the target over a partial cache
OF_PASSES: list[tuple[str, dict[str, Any]]] = [
    ("tokenswift", {"draft": "partial", **TREE, **SMALL}),
    ("auto", {"draft": "partial", **SMALL}),
    ("magicdec", {"gamma": 3, "kv": "snapkv", **SMALL}),
    ("magicdec", {"gamma": 3, "kv": "streaming", **SMALL}),
    ("triforce", {"gamma": 5, "inner_gamma": 2, "chunk": 2, "budget": 24, "sinks": 2, "draft_budget": 16}),
]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In adaptive drafting everything pays."""
    fix_prices(monkeypatch)


def equal_to_plain(
    llm: LLM, strategy: str, options: dict[str, Any], params: SamplingParams, caplog: Any, *words: str
) -> Any:
    """The run has plain decoding's tokens and says once what was refused; its result."""
    plain = llm.generate(prompt(PROMPT), NEW, "autoregressive", sampling=params)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tokenswift"):
        got = llm.generate(prompt(PROMPT), NEW, strategy, options, params)
    assert got.token_ids == plain.token_ids
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "\n" not in lines[0], lines
    assert all(word in lines[0] for word in (*words, "NaN")), lines
    return got


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
@pytest.mark.parametrize("from_level", [0, 2])
def test_heads(
    kind: str, from_level: int, sampling: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, sure = SAMPLINGS[sampling], sampling == "greedy"
    heads = broken(scripted_heads(kind), from_level)
    if kind == "conditioned" and from_level:
        monkeypatch.setattr(HeadLevels, "level", _from_level(from_level))
    llm = LLM.from_model(scripted_model(sure), heads=heads)
    cases = [*OF_HEADS, ("medusa", {"tree": (2, 1, 2)})] if kind == "medusa" else OF_HEADS
    for strategy, options in cases:
        with monkeypatch.context() as patch:
            if strategy == "auto":
                patch.setattr(Control, "mode", _open(HIDDEN if options["draft"] == "hidden" else PARTIAL))
            got = equal_to_plain(llm, strategy, options, params, caplog, "draft heads")
        if from_level and "tree" in options and options.get("draft") != "partial" and "ngrams" not in options:
            assert got.metrics.steps < NEW - 2, "what the first heads drafted was used until they were left"


def broken(heads: Heads, from_level: int) -> Heads:
    """The heads from ``from_level`` on with NaN for weights (all of them where they share theirs)."""
    if heads.conditioned and from_level:
        return heads
    for layer in list(heads.layers)[from_level:]:
        for parameter in layer.parameters():
            parameter.data.fill_(torch.nan)
    return heads


def _from_level(first: int) -> Any:
    real = HeadLevels.level

    def level(self: HeadLevels, head: int, base: torch.Tensor, states: torch.Tensor, last: list[int]) -> Any:
        states, logits = real(self, head, base, states, last)
        return states, logits * torch.nan if head >= first else logits

    return level


def _open(name: str) -> Any:
    """A mode for every step, until it is dropped."""
    wanted, other = always(name), Control.mode

    def mode(self: Control, context: int, load: BatchLoad = ALONE) -> str:
        return (wanted if self._open(name, context) else other)(self, context, load)

    return mode


@pytest.mark.parametrize("case", OF_MODELS, ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))))
@pytest.mark.parametrize("late", [0, 9])
def test_draft_models(
    case: tuple[str, dict[str, Any]], late: int, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model whose passes give NaN, from the first or from the tenth on."""
    strategy, options = case
    rows = watch(monkeypatch, late)
    if strategy == "auto":
        monkeypatch.setattr(Control, "mode", _open(MODEL))
    llm = LLM.from_model(scripted_model(), heads=None)
    options = {**options, "draft_model": scripted_model()}
    equal_to_plain(llm, strategy, options, GREEDY, caplog, "draft model")
    assert late < len(rows) <= late + 4, "left out after a few refused rows"


def watch(monkeypatch: pytest.MonkeyPatch, late: int) -> list[int]:
    """Draft models give NaN after ``late`` passes; what is returned has an entry for each pass."""
    real, rows = ModelContext.row, []

    def row(self: ModelContext, text: list[int], ahead: Any) -> torch.Tensor:
        rows.append(len(text))
        found = real(self, text, ahead)
        return found if len(rows) <= late else found * torch.nan

    monkeypatch.setattr(ModelContext, "row", row)
    return rows


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", OF_PASSES, ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))))
@pytest.mark.parametrize("late", [0, 6])
def test_passes_over_partial_caches(
    case: tuple[str, dict[str, Any]], late: int, sampling: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, options = case
    llm = LLM.from_model(scripted_model(), heads=scripted_heads("linear"))
    passes = broken_passes(monkeypatch, llm, late)
    if strategy == "auto":
        monkeypatch.setattr(Control, "mode", _open(PARTIAL))
    if strategy == "triforce":
        options = {**options, "draft_model": scripted_model()}
    equal_to_plain(llm, strategy, options, SAMPLINGS[sampling], caplog, "partial cache")
    assert late < passes[0] <= late + 4, "left out after a few refused rows"


def broken_passes(monkeypatch: pytest.MonkeyPatch, llm: LLM, late: int) -> list[int]:
    """The target's passes over partial caches give NaN after ``late`` of them: counted."""
    count, model = [0], llm.target

    def broken(real: Any) -> Any:
        def forward(self: Any, tokens: Any, positions: Any, cache: Any, parents: Any = None) -> Any:
            made = real(self, tokens, positions, cache, parents)
            if self is model and isinstance(cache, SparseCache):
                count[0] += 1
                if count[0] > late:
                    return replace(made, hidden=made.hidden * torch.nan)
            return made

        return forward

    monkeypatch.setattr(NativeTarget, "forward", broken(NativeTarget.forward))
    return count


def test_the_targets_own_nan_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(scripted_model(), heads=scripted_heads("linear"))
    real = type(llm.target).logits

    def logits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return real(self, hidden) * (torch.nan if self is llm.target else 1.0)

    monkeypatch.setattr(type(llm.target), "logits", logits)
    for strategy, options in [("autoregressive", {}), *OF_HEADS, *OF_MODELS[1:], *OF_PASSES]:
        given = {**options, "draft_model": scripted_model()} if strategy == "triforce" else options
        with pytest.raises(RunError, match="the model's logits for position 50 hold NaN"):
            llm.generate(prompt(PROMPT), NEW, strategy, given, GREEDY)


@pytest.mark.parametrize("named", [False, True])
def test_a_draft_model_without_numbers_is_named_when_it_is_loaded(
    named: bool, tiny_folder: Any, tmp_path: Path
) -> None:
    """NaN in its weights: one line that speaks of the draft model, not of the model."""
    llm = LLM(str(tiny_folder()), device="cpu", heads="none")
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder())
    model.lm_head.weight.data[:] = torch.nan
    if named:
        shutil.copytree(tiny_folder(), tmp_path / "draft")
        model.save_pretrained(tmp_path / "draft")
    wanted = str(tmp_path / "draft") if named else model
    with pytest.raises(InputError, match=r"^draft_model [^\n]*NaN"):
        llm.generate([1, 2, 3], 4, "magicdec", {"draft_model": wanted})
