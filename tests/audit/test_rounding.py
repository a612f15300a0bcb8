"""The audit's reference: errors that all of our passes share, and what rounding explains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families import family as family_case
from tests.gguf_files import QuantType, small, write
from tests.lossless import toy
from tests.planted import cast, entries_lost, prefilled, second_chunk_shifted, second_part_shifted, windowless
from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit import equality, rounding
from tokenswift.audit.logits import NumericError, numeric_error
from tokenswift.audit.rounding import Distance, Rounding, reference_rows

LONG = torch.randint(2, VOCAB, (80,), generator=torch.Generator().manual_seed(7)).tolist()

# ---- errors that one-row and tree passes share --------------------------------------------------

DEFECTS: dict[str, Callable[[Any], LLM]] = {
    "shifted": lambda model: prefilled(LLM.from_model(model), second_part_shifted(40)),
    "entries": lambda model: prefilled(LLM.from_model(model), entries_lost),
    "window": windowless,
}
CASES = [
    family_case(family, defect)
    for family in FAMILIES
    for defect in DEFECTS
    if defect != "window" or family.endswith("sliding")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "defect"), CASES)
def test_an_error_that_both_passes_share_is_not_sound(family: str, defect: str, dtype: torch.dtype) -> None:
    llm = DEFECTS[defect](cast(tiny_model(family), dtype))
    plain = equality.plain_text(llm, LONG, 40, SamplingParams())
    error = numeric_error(llm, LONG, plain.tokens, plain.kept)
    assert not error.sound, error


def test_a_one_row_pass_that_equals_transformers_is_no_failure() -> None:
    """Tree passes that round once more than passes with no error at all are as sound as they are."""
    llm = LLM.from_model(cast(tiny_model("llama"), torch.bfloat16))
    plain = equality.plain_text(llm, LONG, 40, SamplingParams())
    text = [*LONG, *plain.tokens]
    with torch.inference_mode():
        own = llm.model(torch.tensor([text]), use_cache=False).logits[0].float()
    same = {i: own[len(LONG) - 1 + i] for i in plain.kept}
    assert numeric_error(llm, LONG, plain.tokens, same).sound


@pytest.mark.parametrize("defect", ["shifted", "window", None])
def test_the_toy_sees_chunks_and_windows(monkeypatch: pytest.MonkeyPatch, defect: str | None) -> None:
    """Whatever the user's texts: the toy's prompt is longer than a chunk, its window smaller than that."""
    model = tiny_model("mistral-sliding", sliding_window=4096)
    assert toy.toy_model(model).config.sliding_window == toy.WINDOW
    if defect is not None:
        plant = {"window": windowless, "shifted": second_chunk_shifted}[defect]
        monkeypatch.setattr(toy, "LLM", SimpleNamespace(from_model=lambda model, heads=None: plant(model)))
    for dtype in (torch.float32, torch.bfloat16):
        assert toy.toy_error(model, dtype).sound == (defect is None)


# ---- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama-yarn", "qwen2-sliding", "qwen3", "mistral-sliding"])
def test_finer_arithmetic_equals_a_converted_copy(family: str, attention: str) -> None:
    model = cast(tiny_model(family, attention), torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own, finer = reference_rows(LLM.from_model(model), LONG, [3, 79])
    assert finer.dtype == torch.float32 and 0 < (own - finer).abs().max() < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():
        whole = cast(tiny_model(family, attention), torch.bfloat16)
        keep = torch.tensor([3, 79])
        cast(whole, torch.float32)
        copied = whole(torch.tensor([LONG]), use_cache=False, logits_to_keep=keep).logits[0]
    assert torch.equal(finer, copied)


def test_the_reference_of_float32_is_finer_than_float32() -> None:
    model = tiny_model("llama")
    own, finer = reference_rows(LLM.from_model(model), LONG, [79])
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(torch.tensor([LONG]), use_cache=False).logits[0, [79]]
    assert finer.dtype == torch.float64
    assert 0 < (own - finer).abs().max() < 1e-4 and (finer - exact).abs().max() < 1e-4


def test_whole_numbers_have_a_reference_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "small.gguf", small(), {"": QuantType.Q8_0})
    llm = LLM(tmp_path / "small.gguf")
    if not llm.target.backend.panels:
        pytest.skip("no compiled kernels here")
    llm = LLM(tmp_path / "small.gguf", activations="int8")
    prompt = LONG[:40]
    plain = equality.plain_text(llm, prompt, 20, SamplingParams())
    assert numeric_error(llm, prompt, plain.tokens, plain.kept).sound
    monkeypatch.setattr(rounding, "quantized", lambda states: states)
    assert not numeric_error(llm, prompt, plain.tokens, plain.kept).sound


@pytest.mark.parametrize("window", [None, 24])
def test_int8_attention_has_a_reference_of_its_own(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit of int8 is sound; it would not be with float keys, values and probabilities for reference."""
    kind, more = ("mistral", {"sliding_window": window}) if window else ("llama", {})
    model = small(kind, max_position_embeddings=512, **more)
    said = {"llama.attention.sliding_window": window} if window else {}
    write(tmp_path / "small.gguf", model, {"": QuantType.Q8_0}, said=said)
    llm = LLM(tmp_path / "small.gguf")
    if llm.dtype != "int8":
        pytest.skip("no compiled kernels here")
    prompt = LONG * 5  # more than a chunk of keys
    plain = equality.plain_text(llm, prompt, 20, SamplingParams())
    assert numeric_error(llm, prompt, plain.tokens, plain.kept).sound
    llm = LLM(tmp_path / "small.gguf", dtype="float32", kv_cache_dtype="int8")
    plain = equality.plain_text(llm, prompt, 20, SamplingParams())
    assert numeric_error(llm, prompt, plain.tokens, plain.kept).sound
    monkeypatch.setattr(rounding, "_rounded", lambda rows: (rows, torch.ones_like(rows[..., :1])))
    assert not numeric_error(llm, prompt, plain.tokens, plain.kept).sound


def test_soundness_is_bound_by_the_dtypes_rounding() -> None:
    own = Rounding(Distance(1e-2, 4e-3), 1e-3, 4.0)

    def sound(one_row: Distance, tree: Distance, error: float = 0.0, rounding: Rounding = own) -> bool:
        return NumericError(10, error, one_row, tree, rounding).sound

    good, none = Distance(3e-2, 1e-2), Distance(0.0, 0.0)
    assert sound(good, good) and sound(none, good) and sound(good, none)
    assert not sound(Distance(5e-2, 1e-2), good) and not sound(good, Distance(5e-2, 1e-2))
    assert not sound(good, Distance(3e-2, 2e-2))  # within at its worst, but nearly everywhere off
    assert sound(Distance(4e-3, 4e-3), none, 0.0, Rounding(none, 1e-3, 4.0))  # not nearer than one rounding
    assert not sound(good, good, math.inf)
    assert not sound(good, good, 0.0, Rounding(Distance(math.inf, 1.0), 1e-3, 4.0))
