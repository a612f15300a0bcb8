"""Log-probabilities of a prompt are those of transformers' own rows, however the prompt was read."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import SIZES, VOCAB, build, tiny_model
from tokenswift import LLM, InputError, Logprob, Request, Scheduler
from tokenswift.engine.sequence import ROWS
from tokenswift.models.decoder import PREFILL_CHUNK
from tokenswift.models.generic import GenericTarget

TOP = 3
LONG = random.Random(5).choices(range(2, VOCAB), k=PREFILL_CHUNK + 2 * ROWS + 7)  # three passes
ROOM: dict[str, Any] = {"max_position_embeddings": 1024}
KINDS: dict[str, Any] = {
    "compiled": lambda: (tiny_model("llama", **ROOM), {}),
    "torch": lambda: (tiny_model("llama", **ROOM), {"backend": "torch"}),
    "transformers": lambda: (build("gemma", {**SIZES, **ROOM, "head_dim": 8}), {}),
}
PLAIN = ("autoregressive", {})
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    PLAIN,
    ("auto", {}),
    ("magicdec", {"gamma": 3, "budget": 30, "sinks": 2}),
)


def due(model: Any, prompt: list[int]) -> torch.Tensor:
    """By transformers' own forward: (T - 1, V) log-probabilities of what follows each token."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def check(found: list[Logprob | None], rows: torch.Tensor, prompt: list[int]) -> None:
    """Of every token but the first, with the likeliest ones and its place among all."""
    first, *rest = found
    assert first is None and len(rest) == len(rows) == len(prompt) - 1
    for at, (each, row, token) in enumerate(zip(rest, rows, prompt[1:], strict=True)):
        assert each is not None
        best = row.topk(TOP)
        values = [each.logprob, *(value for _, value in each.top)]
        assert values == pytest.approx([row[token].item(), *best.values.tolist()], abs=1e-4), at
        assert each.rank == 1 + int((row > row[token]).sum()), at
        assert [token for token, _ in each.top] == best.indices.tolist(), at


@pytest.mark.parametrize("kind", KINDS)
def test_those_of_transformers(kind: str) -> None:
    """Across the borders of passes and of the rows that the LM head takes; plain and drafted texts."""
    model, options = KINDS[kind]()
    llm = LLM.from_model(model, heads=None, **options)
    assert isinstance(llm.target, GenericTarget) == (kind == "transformers")
    rows = due(model, LONG)
    known = llm.generate(LONG, 4, *PLAIN, seed=3, ignore_eos=True)
    for way in WAYS:
        made = llm.generate(LONG, 4, *way, seed=3, ignore_eos=True, prompt_logprobs=TOP)
        check(made.prompt_logprobs, rows, LONG)
        assert made.token_ids == known.token_ids and known.prompt_logprobs == [] == made.logprobs
    alone = llm.generate(LONG[:40], 0, prompt_logprobs=TOP)
    assert alone.token_ids == [] and alone.text == "" and alone.finish_reason == "length"
    assert alone.metrics.steps == 0
    check(alone.prompt_logprobs, rows[:39], LONG[:40])


def test_of_texts_that_share_passes_and_beginnings() -> None:
    """Bit for bit those of a text alone: read beside others' steps, after the same beginning was read."""
    model = tiny_model("llama", **ROOM)
    llm = LLM.from_model(model, heads=None)
    prompts = [LONG, LONG[:300] + [5, 6, 7], LONG[:300], [9], LONG[:90] * 2, LONG]
    asked = [TOP, 0, TOP, TOP, None, TOP]
    new = [5, 30, 0, 0, 30, 5]
    alone = [
        llm.generate(prompt, n, *PLAIN, seed=3, ignore_eos=True, prompt_logprobs=top)
        for prompt, top, n in zip(prompts, asked, new, strict=True)
    ]
    assert alone[3].prompt_logprobs == [None]
    with Scheduler(llm, at_once=4) as scheduler:
        scheduler.submit(Request(LONG, 1)).wait()
        usual = replace(llm.default_sampling([1]), seed=3)
        tickets = [
            scheduler.submit(Request(p, n, *PLAIN, usual, ignore_eos=True, prompt_logprobs=top))
            for p, top, n in zip(prompts, asked, new, strict=True)
        ]
        steps = [[*ticket.steps()] for ticket in tickets]
        assert scheduler.figures().reused >= 90 and scheduler.figures().ended == 1 + len(prompts)
    for ticket, right, made in zip(tickets, alone, steps, strict=True):
        assert ticket.result.token_ids == right.token_ids
        assert ticket.result.prompt_logprobs == right.prompt_logprobs
        told = [step.prompt_logprobs for step in made]
        assert [*map(list, told[:1])] == ([right.prompt_logprobs] if made else []) and not any(told[1:])
    many = llm.generate_many(prompts[:3], 5, *PLAIN, seed=3, ignore_eos=True, prompt_logprobs=TOP)
    for found, prompt in zip(many, prompts, strict=False):
        check(found.prompt_logprobs, due(model, prompt), prompt)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt_logprobs": -1}, "^prompt_logprobs is -1; valid: an integer from 0 to 20, or None$"),
    ({"prompt_logprobs": 21}, "^prompt_logprobs is 21; valid: an integer from 0 to 20, or None$"),
    ({"prompt_logprobs": True}, "^prompt_logprobs is True; valid: an integer"),
    ({"max_new_tokens": 0}, "^max_new_tokens is 0; valid: an integer of at least 1$"),
    ({"max_new_tokens": -1, "prompt_logprobs": 0}, "^max_new_tokens is -1; valid: an integer of at least 0$"),
    ({"logprobs_mode": "raw"}, "^logprobs_mode is 'raw'; valid: processed_logprobs, raw_logprobs"),
)


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request([5, 6], **options)
