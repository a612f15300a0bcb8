"""Log-probabilities of a prompt's own tokens, and several texts of one prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tokenswift import LLM, InputError
from tokenswift.checks import LARGEST

PROMPT = [5, 9, 5, 9, 30, 5, 9] * 12  # longer than a block of rows
PLAIN: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "dry_multiplier": 0.0}
STRATEGIES = ("autoregressive", "auto")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=None)


def test_they_are_those_of_transformers(llm: LLM) -> None:
    """The first token has none; sampling parameters change nothing."""
    result = llm.generate(PROMPT, 1, prompt_logprobs=3, temperature=0.3, repetition_penalty=1.5)
    with torch.no_grad():
        rows = tiny_model("llama")(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    first, *records = result.prompt_logprobs
    assert first is None
    assert len(records) == len(PROMPT) - 1
    for place, record in enumerate(records):
        assert record is not None
        assert record.logprob == pytest.approx(rows[place, PROMPT[place + 1]].item(), abs=1e-4)
        best = rows[place].topk(3)
        assert [token for token, _ in record.top] == best.indices.tolist()
        assert [value for _, value in record.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_equal_those_of_decoding(llm: LLM, strategy: str) -> None:
    """What a text's tokens have when they are chosen, they have as a prompt, bit for bit."""
    text = llm.generate(PROMPT, 50, strategy, seed=3, ignore_eos=True, logprobs=2, **PLAIN)
    again = llm.generate([*PROMPT, *text.token_ids], 1, prompt_logprobs=2)
    assert again.prompt_logprobs[len(PROMPT) :] == text.logprobs


def test_each_way_of_running_a_prompt_has_all_of_them(llm: LLM) -> None:
    """Concurrent texts, which could share a prefix; streams; a prefilled prompt."""
    expected = llm.generate(PROMPT, 5, prompt_logprobs=1).prompt_logprobs
    several = llm.generate_many([PROMPT, PROMPT], 5, at_once=2, prompt_logprobs=1)
    assert [result.prompt_logprobs for result in several] == [expected, expected]
    steps = list(llm.stream(PROMPT, 5, prompt_logprobs=1))
    assert list(steps[0].prompt_logprobs) == expected
    assert not any(step.prompt_logprobs for step in steps[1:])
    assert llm.prefill(PROMPT).generate(5, prompt_logprobs=1).prompt_logprobs == expected
    assert llm.generate(PROMPT, 5).prompt_logprobs == []
    assert llm.generate(PROMPT[:1], 5, prompt_logprobs=1).prompt_logprobs == [None]


def test_a_padded_head_names_no_padding(tiny_folder: Callable[..., Path]) -> None:
    llm = LLM(tiny_folder(vocab_size=300), heads="none")
    result = llm.generate("hello, hello", 1, prompt_logprobs=20)
    tops = [record.top for record in result.prompt_logprobs if record is not None]
    assert all(token < 260 for top in tops for token, _ in top)


def test_several_texts_of_a_prompt_have_one_seed_after_another(llm: LLM) -> None:
    prompts = [PROMPT, PROMPT[:20]]
    results = llm.generate_many(prompts, 20, n=3, seed=LARGEST - 1)
    alone = [
        llm.generate(prompt, 20, seed=seed).token_ids
        for prompt in prompts
        for seed in (LARGEST - 1, LARGEST, 0)
    ]
    assert [result.token_ids for result in results] == alone
    assert len({*map(tuple, alone)}) == len(alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; valid: an integer from 0 to 20, or None"),
        (
            {"prompt_logprobs": 1, "run_dir": "r"},
            "prompt_logprobs are not kept in a run_dir; valid: one of the two",
        ),
    ],
)
def test_bad_numbers(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate(PROMPT, 5, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_bad_numbers_of_texts(llm: LLM, n: Any) -> None:
    with pytest.raises(InputError, match="^n is .*; valid: an integer of at least 1$"):
        llm.generate_many([PROMPT], 5, n=n)
