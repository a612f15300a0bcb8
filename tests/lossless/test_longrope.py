"""Positions of short and of long texts (LongRoPE): which of them a text has is decided once, by its
prompt and what it may become, and holds in runs that go on, in batches and in shared beginnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_tokenizer
from tests.lossless.test_strategies import SMALL
from tests.lossless.test_tokens import random_heads
from tests.tiny import LONGROPE_BORDER, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.config.loading import LoadConfig
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.loader.frequencies import longrope_magnitude
from tokenswift.loader.rope import rotary_of
from tokenswift.memory import default_length
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.source import FromFiles
from tokenswift.runs.folder import load as run_state
from tokenswift.types import InputError

PROMPT = torch.randint(2, VOCAB, (25,), generator=torch.Generator().manual_seed(6)).tolist()
#: new tokens up to the border, and beyond it
SHORT = LONGROPE_BORDER - len(PROMPT)
LONG = SHORT + 20
GREEDY: dict[str, Any] = {"sampling": SamplingParams(greedy=True, repetition_penalty=1.0)}
GREEDY |= {"ignore_eos": True}
DRAWN: dict[str, Any] = {"sampling": SamplingParams(seed=3, temperature=1.3, penalty_window=20)}
DRAWN |= {"ignore_eos": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "tokenswift": {"tree": (2, 2), "ngrams": 3, "draft": "partial", **SMALL},
    "magicdec": {"gamma": 3, **SMALL},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    heads = random_heads("conditioned", 48, VOCAB)
    return LLM.from_model(tiny_model("phi3-longrope"), heads=heads)


def reference(new: int) -> list[int]:
    """A greedy text by transformers' own forward, whose list of factors is that of the whole
    text."""
    model = tiny_model("phi3-longrope")
    embedding: Any = model.model.rotary_emb
    rotary = rotary_of(model)
    frequencies = rotary.single(rotary.is_long(len(PROMPT) + new))[: rotary.pairs]
    embedding.original_inv_freq = frequencies.clone()
    embedding.long_inv_freq = frequencies.clone()
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(new):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("new", [SHORT, SHORT + 1, LONG])
def test_a_text_has_the_factors_of_what_it_may_become_from_its_first_token(
    llm: LLM, new: int
) -> None:
    assert llm.generate(PROMPT, new, "autoregressive", **GREEDY).token_ids == reference(new)


def test_short_and_long_texts_are_different_texts(llm: LLM) -> None:
    """Otherwise the tests here would show nothing."""
    short = llm.generate(PROMPT, SHORT, "autoregressive", **GREEDY).token_ids
    long = llm.generate(PROMPT, LONG, "autoregressive", **GREEDY).token_ids
    assert short != long[:SHORT]


@pytest.mark.parametrize("computes", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("new", [SHORT, LONG])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_writes_what_plain_decoding_writes(
    strategy: str, new: int, computes: str
) -> None:
    model = tiny_model("phi3-longrope")
    if computes == "bfloat16":
        model = model.bfloat16()
    llm = LLM.from_model(model, heads=random_heads("conditioned", 48, VOCAB))
    assert isinstance(llm.target, NativeTarget)
    if computes == "int8":
        llm.target.compute_as(LoadConfig(kv_cache_dtype="int8"), "tiny")
    plain = llm.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids
    drafted = llm.generate(PROMPT, new, strategy, STRATEGIES[strategy], **DRAWN).token_ids
    assert drafted == plain


@pytest.mark.parametrize("new", [SHORT, LONG])
def test_a_prompt_in_chunks_is_read_as_at_once(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = LLM.from_model(tiny_model("phi3-longrope"), heads="none")
    expected = at_once.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 7)
    in_chunks = LLM.from_model(tiny_model("phi3-longrope"), heads="none")
    assert in_chunks.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids == expected


@pytest.mark.parametrize(("window", "expected"), [(511, 511), (512, None), (4096, None)])
def test_a_window_that_no_text_can_leave_is_none(window: int, expected: int | None) -> None:
    llm = LLM.from_model(tiny_model("phi3-longrope", sliding_window=window), heads="none")
    assert llm.target.windows == [expected] * 3


# ---- runs that go on -----------------------------------------------------------------------------


def begin(llm: LLM, folder: Path, new: int, steps: int) -> None:
    """A run that ends after some of its steps, as if it had been killed."""
    stream = llm.stream(PROMPT, new, "autoregressive", **DRAWN, run_dir=folder)
    for _ in range(steps):
        next(stream)
    stream.close()


@pytest.mark.parametrize("new", [SHORT, LONG])
def test_a_run_that_was_cut_goes_on_with_its_own_factors(
    llm: LLM, new: int, tmp_path: Path
) -> None:
    expected = llm.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids
    begin(llm, tmp_path, new, steps=8)
    assert resume(tmp_path, llm=llm).token_ids == expected


def test_a_run_may_become_longer_up_to_the_border(llm: LLM, tmp_path: Path) -> None:
    llm.generate(PROMPT, 8, "autoregressive", **DRAWN, run_dir=tmp_path)
    expected = llm.generate(PROMPT, SHORT, "autoregressive", **DRAWN).token_ids
    assert resume(tmp_path, max_new_tokens=SHORT, llm=llm).token_ids == expected


def test_a_run_may_not_become_longer_across_the_border(llm: LLM, tmp_path: Path) -> None:
    llm.generate(PROMPT, 8, "autoregressive", **DRAWN, run_dir=tmp_path)
    with pytest.raises(InputError) as caught:
        resume(tmp_path, max_new_tokens=SHORT + 1, llm=llm)
    assert str(caught.value) == (
        f"max_new_tokens is {SHORT + 1}, but run_dir {tmp_path} began with the model's positions "
        f"for texts of up to {LONGROPE_BORDER} tokens, prompt included, and longer ones have "
        f"others; valid: up to {SHORT}, or another folder for a text that is longer"
    )
    assert caught.value.field == "max_new_tokens"


def test_a_run_of_a_long_text_keeps_its_factors_where_it_becomes_short(
    llm: LLM, tmp_path: Path
) -> None:
    expected = llm.generate(PROMPT, LONG, "autoregressive", **DRAWN).token_ids
    begin(llm, tmp_path, LONG, steps=8)
    assert resume(tmp_path, max_new_tokens=SHORT, llm=llm).token_ids == expected[:SHORT]


@pytest.mark.parametrize(("new", "positions"), [(SHORT, "short"), (LONG, "long")])
def test_the_journal_says_which_positions_a_run_has(
    llm: LLM, new: int, positions: str, tmp_path: Path
) -> None:
    llm.generate(PROMPT, new, "autoregressive", **DRAWN, run_dir=tmp_path)
    assert run_state(tmp_path)[1].header.identity.positions == positions


# ---- several texts -------------------------------------------------------------------------------


def test_short_and_long_texts_share_passes(llm: LLM) -> None:
    lengths = [SHORT, LONG, 5, LONG + 7]
    plain = [llm.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids for new in lengths]
    requests = [Request(PROMPT, new, "autoregressive", {}, **DRAWN) for new in lengths]
    with Scheduler(llm) as scheduler:
        tickets = [scheduler.submit(request) for request in requests]
        assert [ticket.result.token_ids for ticket in tickets if ticket.wait()] == plain


@pytest.mark.parametrize(("first", "second", "is_shared"), [(SHORT, 5, True), (LONG, SHORT, False)])
def test_beginnings_are_shared_among_texts_of_one_kind(
    llm: LLM, first: int, second: int, is_shared: bool
) -> None:
    """A long prompt, of which more is shared than what is read anew."""
    border = 4 * LONGROPE_BORDER
    model = tiny_model("phi3-longrope", original_max_position_embeddings=border)
    longer = LLM.from_model(model, heads="none")
    prompt = (PROMPT * 8)[: border - SHORT]
    plain = longer.generate(prompt, second, "autoregressive", **DRAWN).token_ids
    with Scheduler(longer) as scheduler:
        scheduler.submit(Request(prompt, first, "autoregressive", {}, **DRAWN)).wait()
        ticket = scheduler.submit(Request(prompt, second, "autoregressive", {}, **DRAWN))
        ticket.wait()
        assert ticket.result.token_ids == plain
        assert bool(scheduler.figures().reused) is is_shared


@pytest.mark.parametrize("new", [SHORT, LONG])
def test_a_prefilled_prompt_serves_short_and_long_texts(llm: LLM, new: int) -> None:
    expected = llm.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids
    prefilled = llm.prefill(PROMPT)
    assert prefilled.generate(new, "autoregressive", **DRAWN).token_ids == expected


def test_an_answer_stays_short_by_default_where_that_leaves_it_room(llm: LLM) -> None:
    model = tiny_model(
        "phi3-longrope", original_max_position_embeddings=4096, max_position_embeddings=65536
    )
    target = LLM.from_model(model, heads="none").target
    assert default_length(target, True, 100) == 4096 - 100
    assert default_length(target, True, 4096 - 1024) == 1024
    assert default_length(target, True, 4096 - 1023) > 1024


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves a tiny model with a tokenizer, and fields of its config."""

    def saved(**changes: object) -> Path:
        tiny_model("phi3-longrope", vocab_size=260).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return saved


#: as Phi-4-mini's own file has them
PUBLISHED = {
    "rope_parameters": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 3.0, 6.0],
    },
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
}


@pytest.mark.parametrize("changes", [{}, PUBLISHED], ids=["saved", "published"])
def test_a_folder_gives_what_the_model_gives(
    save: Callable[..., Path], changes: dict[str, object], tmp_path: Path
) -> None:
    folder = save(**changes)
    opened = LLM(folder, device="cpu", heads="none")
    loaded = LLM.from_model(tiny_model("phi3-longrope", vocab_size=260), heads="none")
    assert isinstance(opened.source, FromFiles)
    assert opened.target.identity() == loaded.target.identity()
    ours = opened.source.identity
    theirs = loaded.source.identity
    assert ours["config"] == theirs["config"]
    assert ours["weights"] == theirs["weights"]
    for new in (SHORT, LONG):
        text = opened.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids
        assert text == loaded.generate(PROMPT, new, "autoregressive", **DRAWN).token_ids


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_a_list_of_factors_has_one_for_each_pair(save: Callable[..., Path], name: str) -> None:
    rope: dict[str, object] = deepcopy(PUBLISHED["rope_scaling"])
    rope[name] = [1.0, 2.0]
    folder = save(**{**PUBLISHED, "rope_scaling": rope})
    with pytest.raises(InputError, match=rf"rope_parameters.{name} has 2 numbers; valid: 3, one"):
        LLM(folder, device="cpu", heads="none")


@pytest.mark.parametrize("value", [0.0, -1.0, "x"])
def test_a_factor_is_a_positive_number(save: Callable[..., Path], value: object) -> None:
    rope: dict[str, object] = deepcopy(PUBLISHED["rope_scaling"])
    rope["long_factor"] = [1.0, value, 1.0]
    folder = save(**{**PUBLISHED, "rope_scaling": rope})
    with pytest.raises(InputError, match=r"rope_scaling.long_factor"):
        LLM(folder, device="cpu", heads="none")


def test_the_magnitude_of_phi_4_mini() -> None:
    rope = {"original_max_position_embeddings": 4096}
    assert longrope_magnitude(rope, 131072) == pytest.approx(1.1902, abs=1e-4)
