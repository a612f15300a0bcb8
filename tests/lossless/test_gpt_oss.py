"""gpt-oss: logits beyond its window are those of transformers, and what other engines left out of
it would be seen here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.lossless.test_strategies import SMALL
from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.config.loading import LoadConfig
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.kernels.base import Backend
from tokenswift.models import source, target
from tokenswift.models.decoder import NativeTarget

PROMPT = torch.randint(2, VOCAB, (200,), generator=torch.Generator().manual_seed(6)).tolist()
DRAWN = SamplingParams(seed=3, temperature=1.3, penalty_window=20)
STRATEGIES: dict[str, dict[str, object]] = {
    "auto": {},
    "tokenswift": {"tree": (2, 2), "ngrams": 3, "draft": "partial", **SMALL},
    "magicdec": {"gamma": 3, **SMALL},
}


#: a tiny model with the real ones' window, and layers of both kinds
real_model = partial(tiny_model, "gpt_oss", sliding_window=128, num_hidden_layers=4, head_dim=16)


def native(model: PreTrainedModel) -> NativeTarget:
    """The native decoder of a model of transformers."""
    decoder = LLM.from_model(model, heads="none").target
    assert isinstance(decoder, NativeTarget)
    return decoder


def logits_of(decoder: NativeTarget, prompt: list[int], chunk: int = 512) -> torch.Tensor:
    """Logits of all rows of a prompt, read in chunks."""
    cache = decoder.new_cache(len(prompt))
    rows: list[torch.Tensor] = []
    for start in range(0, len(prompt), chunk):
        tokens = torch.tensor(prompt[start : start + chunk])
        positions = torch.arange(start, start + len(tokens))
        passed = decoder.forward(tokens, positions, cache)
        rows.append(decoder.logits(passed.hidden))
        cache.commit(tuple(range(len(tokens))))
    return torch.cat(rows)


def reference(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Logits of transformers' own forward."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]


def text_of(
    llm: LLM,
    prompt: list[int],
    new: int,
    strategy: str = "autoregressive",
    options: Mapping[str, object] | None = None,
) -> list[int]:
    """A drawn text."""
    result = llm.generate(prompt, new, strategy, options, DRAWN, ignore_eos=True)
    return list(result.token_ids)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected ones."""
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_logits_are_those_of_transformers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch":
        for where in (target, source):
            monkeypatch.setattr(where, "backend_for", lambda *_: Backend())
    model = real_model()
    assert distance(logits_of(native(model), PROMPT), reference(model, PROMPT)) < 1e-5


def test_a_prompt_in_chunks_has_the_bits_of_one_pass() -> None:
    decoder = native(real_model())
    assert torch.equal(logits_of(decoder, PROMPT, 37), logits_of(decoder, PROMPT))


def without_sinks(decoder: NativeTarget) -> None:
    for layer in decoder.body.weights:
        layer.sinks = None
    decoder.body = decoder.backend.body(decoder.body.shape, decoder.body.weights)


def without_windows(decoder: NativeTarget) -> None:
    for layer in decoder.body.weights:
        layer.window = min(layer.window, 1) * 10_000
    decoder.body = decoder.backend.body(decoder.body.shape, decoder.body.weights)


def without_limit(decoder: NativeTarget) -> None:
    shape = replace(decoder.body.shape, gate_limit=1e6)
    decoder.body = decoder.backend.body(shape, decoder.body.weights)


FAULTS: dict[str, tuple[Callable[[NativeTarget], None] | None, dict[str, object]]] = {
    "no window": (without_windows, {}),
    "no sinks": (without_sinks, {}),
    "the limit of gates is not passed on": (without_limit, {}),
    "a base of 10,000": (None, {"rope_theta": 10_000.0}),
    "no magnitude of YaRN": (None, {"attention_factor": 1.0}),
    "YaRN's borders are whole numbers": (None, {"truncate": True}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_others_left_out_is_seen(name: str) -> None:
    """Each makes other logits; only the window needs a text beyond it."""
    fault, positions = FAULTS[name]
    model = real_model()
    rope = {**model.config.rope_parameters, **positions}
    decoder = native(real_model(rope_parameters=rope))
    if fault is not None:
        fault(decoder)
    expected = reference(model, PROMPT)
    logits = logits_of(decoder, PROMPT)
    assert distance(logits[-20:], expected[-20:]) > 1e-3
    if name == "no window":
        assert distance(logits[:128], expected[:128]) < 1e-5


@pytest.mark.parametrize("computes", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_writes_what_plain_decoding_writes(strategy: str, computes: str) -> None:
    model = real_model()
    if computes == "bfloat16":
        model = model.bfloat16()
    llm = LLM.from_model(model, heads=random_heads("conditioned", 48, VOCAB))
    assert isinstance(llm.target, NativeTarget)
    if computes == "int8":
        llm.target.compute_as(LoadConfig(kv_cache_dtype="int8"), "tiny")
    options = STRATEGIES[strategy]
    assert text_of(llm, PROMPT, 40, strategy, options) == text_of(llm, PROMPT, 40)
    prompts = [PROMPT, PROMPT[:120], [*PROMPT[:150], 5]]
    expected = [text_of(llm, one, 30) for one in prompts]
    with Scheduler(llm) as scheduler:
        tickets = [
            scheduler.submit(Request(one, 30, strategy, options, DRAWN, ignore_eos=True))
            for one in prompts
        ]
        assert [ticket.result.token_ids for ticket in tickets if ticket.wait()] == expected


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    llm = LLM.from_model(real_model(), heads="none")
    expected = text_of(llm, PROMPT, 60)
    llm.generate(PROMPT, 20, "auto", sampling=DRAWN, ignore_eos=True, run_dir=tmp_path)
    assert resume(tmp_path, max_new_tokens=60, llm=llm).token_ids == expected
