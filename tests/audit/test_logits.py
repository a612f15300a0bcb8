"""Logits against transformers' pass in float32: sound families pass, planted errors do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families import families
from tests.families import family as family_case
from tests.gguf_files import QuantType, small, write
from tests.lossless import toy
from tests.planted import (
    cast,
    entries_lost,
    prefilled,
    second_chunk_shifted,
    second_part_shifted,
    windowless,
)
from tests.tiny import PLAIN, VOCAB, tiny_model
from tokenswift import LLM
from tokenswift.audit.logits import LogitError, logit_error
from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Pass

LONG = torch.randint(2, VOCAB, (80,), generator=torch.Generator().manual_seed(7)).tolist()


def written(llm: LLM, prompt: list[int]) -> list[int]:
    """A text by plain decoding."""
    return llm.generate(prompt, 24, "autoregressive", ignore_eos=True).token_ids


def error_of(llm: LLM, prompt: list[int] = LONG) -> LogitError:
    return logit_error(llm, prompt, written(llm, prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", families())
def test_families_are_sound(family: str, dtype: torch.dtype) -> None:
    error = error_of(LLM.from_model(cast(tiny_model(family), dtype)))
    assert error.sound, error
    assert error.positions == 24
    assert 0 < error.one_row[1] <= error.one_row[0], error


DEFECTS: dict[str, Callable[[Any], LLM]] = {
    "shifted": lambda model: prefilled(LLM.from_model(model), second_part_shifted(40)),
    "entries": lambda model: prefilled(LLM.from_model(model), entries_lost),
    "window": windowless,
}
CASES = [
    family_case(family, defect)
    for family in PLAIN
    for defect in DEFECTS
    if defect != "window" or family.endswith("sliding")
]
CASES += [family_case("qwen2_moe", defect) for defect in ("shifted", "entries")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "defect"), CASES)
def test_an_error_that_both_kinds_of_pass_share_is_not_sound(
    family: str, defect: str, dtype: torch.dtype
) -> None:
    error = error_of(DEFECTS[defect](cast(tiny_model(family), dtype)))
    assert not error.sound, error


@pytest.mark.parametrize("defect", ["shifted", "window", None])
def test_the_toy_sees_chunks_and_windows(
    monkeypatch: pytest.MonkeyPatch, defect: str | None
) -> None:
    """Whatever the user's texts: the toy's prompt is longer than a chunk, its window smaller than
    that."""
    model = tiny_model("mistral-sliding", sliding_window=4096)
    assert toy.toy_model(model).config.sliding_window == toy.WINDOW
    if defect is not None:
        plant = {"window": windowless, "shifted": second_chunk_shifted}[defect]
        monkeypatch.setattr(
            toy, "LLM", SimpleNamespace(from_model=lambda model, heads=None: plant(model))
        )
    for dtype in (torch.float32, torch.bfloat16):
        assert toy.toy_error(model, dtype).sound == (defect is None)


def test_trees_at_wrong_positions_are_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(tiny_model("llama"))
    tokens = written(llm, LONG)
    real = llm.target.forward

    def late(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: FullCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        off = 3 if parents is not None and len(tokens) > 1 else 0
        return real(tokens, positions + off, cache, parents)

    monkeypatch.setattr(llm.target, "forward", late)
    error = logit_error(llm, LONG, tokens)
    assert not error.sound
    assert error.error > error.allowed[0]
    assert error.one_row[0] < error.allowed[0]


def test_not_a_number_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(tiny_model("llama"))
    tokens = written(llm, LONG)
    real = llm.target.logits
    monkeypatch.setattr(llm.target, "logits", lambda hidden: real(hidden) * math.nan)
    error = logit_error(llm, LONG, tokens)
    assert not error.sound
    assert error.error == math.inf
    assert error.tree[0] == math.inf


def test_rows_of_a_padded_vocabulary_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(tiny_model("llama"))
    real = llm.target.logits

    def padded(hidden: torch.Tensor) -> torch.Tensor:
        return real(hidden).index_fill(-1, torch.tensor([VOCAB - 1]), -math.inf)

    monkeypatch.setattr(llm.target, "logits", padded)
    assert error_of(llm).sound


@pytest.mark.parametrize(
    "how", [{"dtype": "int8"}, {"dtype": "float32", "kv_cache_dtype": "int8"}], ids=str
)
def test_int8_has_a_bound_of_its_own(how: dict[str, Any], tmp_path: Path) -> None:
    write(
        tmp_path / "small.gguf", small("llama", max_position_embeddings=512), {"": QuantType.Q8_0}
    )
    if LLM(tmp_path / "small.gguf").dtype != "int8":
        pytest.skip("no compiled kernels here")
    llm = LLM(tmp_path / "small.gguf", **how)
    prompt = LONG * 5  # more than a chunk of keys
    error = error_of(llm, prompt)
    assert error.sound, error
    assert error.error == 0
    other = prefilled(llm, lambda real, tokens, cache: real([7] * len(tokens), cache))
    assert not error_of(other, prompt).sound
