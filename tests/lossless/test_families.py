"""Native families whose block is not Llama's: their texts, alone, going on and beside others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import rare
from tests.lossless.test_strategies import PROMPT, SMALL, draft_for, llm_of, runs
from tests.lossless.test_tokens import random_heads, same
from tests.tiny import FAMILIES, SWITCHED, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.config.loading import LoadConfig
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.kernels.base import Backend
from tokenswift.kv import cache as kv
from tokenswift.models import source, target
from tokenswift.models.base import BaseTarget
from tokenswift.models.decoder import NativeTarget

HOW: dict[str, Any] = {"sampling": SamplingParams(seed=3, temperature=1.3, penalty_window=20)}
HOW |= {"ignore_eos": True}
DRAFTED: dict[str, dict[str, object]] = {
    "autoregressive": {},
    "tokenswift": {"tree": (2, 2), "ngrams": 3, "draft": "partial", **SMALL},
    "magicdec": {"gamma": 3, **SMALL},
}


@pytest.mark.parametrize("count", [6, rare(200)])
@pytest.mark.parametrize("family", SWITCHED)
def test_greedy_texts_are_those_of_transformers(family: str, count: int) -> None:
    """Each token is the likeliest by the model's own forward, so the text is its own; windows are
    crossed."""
    model = tiny_model(family)
    llm = LLM.from_model(model, heads="none")
    for length, new in ((3, 24), (40, 12)):
        generator = torch.Generator().manual_seed(length)
        prompts = torch.randint(2, VOCAB, (count // 2, length), generator=generator)
        greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
        results = llm.generate_many(prompts.tolist(), new, sampling=greedy, ignore_eos=True)
        texts = torch.cat([prompts, torch.tensor([one.token_ids for one in results])], 1)
        with torch.inference_mode():
            likeliest = model(input_ids=texts, use_cache=False).logits.argmax(-1)
        assert torch.equal(likeliest[:, length - 1 : -1], texts[:, length:])


PROMPTS = [[*PROMPT, *more] for more in ([5], [5, 9], [7, 7, 3])]


@pytest.fixture(scope="module", params=SWITCHED)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A tiny model of each family, with untrained heads."""
    with llm_of(request.param, "conditioned") as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """What plain decoding writes after each prompt."""
    return [llm.generate(prompt, 40, "autoregressive", **HOW).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("strategy", DRAFTED)
def test_runs_go_on_and_texts_share_passes_and_beginnings(
    llm: LLM, plain: list[list[int]], strategy: str, tmp_path: Path
) -> None:
    options = DRAFTED[strategy]
    llm.generate(PROMPTS[0], 15, strategy, options, **HOW, run_dir=tmp_path)
    assert resume(tmp_path, max_new_tokens=40, llm=llm).token_ids == plain[0]
    requests = [Request(one, 40, strategy, options, **HOW) for one in PROMPTS]
    with Scheduler(llm) as scheduler:
        tickets = [scheduler.submit(requests[0])]
        tickets[0].wait()
        tickets += [scheduler.submit(one) for one in requests[1:]]
        assert [one.result.token_ids for one in tickets if one.wait()] == plain
        assert scheduler.figures().reused


WINDOWED = [name for name, (_, changes) in FAMILIES.items() if changes.get("sliding_window")]
LONG = torch.randint(2, VOCAB, (700,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[kv.FullCache]:
    """The targets' caches as they are made; layers with windows keep little beside them."""
    created: list[kv.FullCache] = []
    real = BaseTarget.new_cache
    monkeypatch.setattr(kv, "BACK", 64)
    monkeypatch.setattr(
        BaseTarget, "new_cache", lambda *a, **how: created.append(real(*a, **how)) or created[-1]
    )
    return created


def keep_whole_numbers(model: NativeTarget, key_type: str) -> None:
    """Keep keys in int8 or int16; or, mixed, in int16 in every second layer."""
    model.compute_as(LoadConfig(kv_cache_dtype="int8" if key_type == "mixed" else key_type), "tiny")
    if key_type != "mixed":
        return
    model.wide_keys = tuple(layer % 2 == 0 for layer in range(model.layers))
    for weights, wide in zip(model.body.weights, model.wide_keys, strict=True):
        weights.wide_keys = wide
    model.body = model.backend.body(model.body.shape, model.body.weights)
    model._count_entries()


def most_of(cache: kv.FullCache) -> int:
    """Bytes that a cache may take: of layers with windows a window, rows, and what ends before a
    chunk."""
    assert cache.tail is not None
    each = cache.tail.entries.data.nbytes // cache.tail.entries.capacity
    return cache.data.nbytes + each * (cache.tail.reach + 64 + kv.CHUNK + 512)


@pytest.mark.parametrize(
    ("kernels", "family"),
    [("native", "gemma3"), ("mixed", "gemma3"), ("torch", "mistral-sliding")]
    + [
        rare(kernels, family)
        for kernels in ("native", "int8", "int16", "mixed", "torch")
        for family in WINDOWED
    ],
)
def test_layers_with_windows_keep_what_they_see(
    kernels: str, family: str, caches: list[kv.FullCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of which most was dropped are those of layers that keep all of it."""
    if kernels == "torch":
        for where in (target, source):
            monkeypatch.setattr(where, "backend_for", lambda *_: Backend())
    model = tiny_model(family, max_position_embeddings=2048)
    draft = draft_for(family)
    llm, unwindowed = (
        LLM.from_model(model, heads=random_heads("medusa", 48, VOCAB)) for _ in range(2)
    )
    monkeypatch.setattr(
        unwindowed.target, "new_cache", partial(unwindowed.target.new_cache, keep_all=True)
    )
    for one in (llm, unwindowed) if kernels in ("int8", "int16", "mixed") else ():
        assert isinstance(one.target, NativeTarget)
        keep_whole_numbers(one.target, kernels)
    assert llm.target.windows == unwindowed.target.windows  # both are made
    for tokens in (16, 160, 1600):
        spare = llm.target.new_cache(tokens).nbytes - llm.target.cache_bytes(tokens)
        assert 0 <= spare < 16 * llm.target.tail_bytes  # a page
    for seed, params in enumerate(
        (SamplingParams(greedy=True, repetition_penalty=1.0), HOW["sampling"])
    ):
        plain = unwindowed.generate(LONG, 150, "autoregressive", sampling=params, ignore_eos=True)
        assert caches[-1].tail is None
        for strategy, options in [("autoregressive", {}), *runs(draft)[seed::2]]:
            before = len(caches)
            assert same(
                plain, llm.generate(LONG, 150, strategy, options, params, ignore_eos=True)
            ), options
            full_cache = next(
                cache for cache in caches[before:] if cache.capacity >= 850
            )  # others: of drafts
            assert full_cache.tail is not None
            assert full_cache.tail.dropped >= 512
            assert full_cache.nbytes <= most_of(full_cache)


def test_beginnings_are_shared_where_windows_are_held(caches: list[kv.FullCache]) -> None:
    """A text that goes on where another ended begins from it; one that leaves it long before is
    read."""
    llm = LLM.from_model(tiny_model("gemma3", max_position_embeddings=2048), heads="none")
    first = llm.generate(LONG, 100, "autoregressive", **HOW).token_ids
    prompts = [LONG, [*LONG, *first, *PROMPT], [*LONG[:200], *PROMPT]]
    plain = [llm.generate(one, 100, "autoregressive", **HOW).token_ids for one in prompts]
    reused = []
    with Scheduler(llm) as scheduler:
        for one in prompts:
            ticket = scheduler.submit(Request(one, 100, "autoregressive", {}, **HOW))
            ticket.wait()
            assert ticket.result.token_ids == plain[len(reused)]
            reused.append(scheduler.figures().reused)
    assert reused == [0, 799, 799]
