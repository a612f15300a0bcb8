"""Native families whose block is not Llama's: their texts, alone, going on and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import rare
from tests.lossless.test_strategies import PROMPT, SMALL, llm_of
from tests.tiny import SWITCHED, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler

HOW: dict[str, Any] = {"sampling": SamplingParams(seed=3, temperature=1.3, penalty_window=20)}
HOW |= {"ignore_eos": True}
DRAFTED: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "tokenswift": {"tree": (2, 2), "ngrams": 3, "draft": "partial", **SMALL},
    "magicdec": {"gamma": 3, **SMALL},
}


@pytest.mark.parametrize("count", [6, rare(200)])
@pytest.mark.parametrize("family", SWITCHED)
def test_greedy_texts_are_those_of_transformers(family: str, count: int) -> None:
    """Each token is the likeliest by the model's own forward, so the text is its own; windows are crossed."""
    model = tiny_model(family)
    llm = LLM.from_model(model, heads="none")
    for length, new in ((3, 24), (40, 12)):
        made = torch.Generator().manual_seed(length)
        prompts = torch.randint(2, VOCAB, (count // 2, length), generator=made)
        greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
        found = llm.generate_many(prompts.tolist(), new, sampling=greedy, ignore_eos=True)
        texts = torch.cat([prompts, torch.tensor([one.token_ids for one in found])], 1)
        with torch.inference_mode():
            likeliest = model(input_ids=texts, use_cache=False).logits.argmax(-1)
        assert torch.equal(likeliest[:, length - 1 : -1], texts[:, length:])


@pytest.mark.parametrize("strategy", DRAFTED)
@pytest.mark.parametrize("family", SWITCHED)
def test_runs_go_on_and_texts_share_passes_and_beginnings(family: str, strategy: str, tmp_path: Path) -> None:
    llm, options = llm_of(family, "conditioned"), DRAFTED[strategy]
    prompts = [[*PROMPT, *more] for more in ([5], [5, 9], [7, 7, 3])]
    plain = [llm.generate(prompt, 40, "autoregressive", **HOW).token_ids for prompt in prompts]
    llm.generate(prompts[0], 15, strategy, options, **HOW, run_dir=tmp_path)
    assert resume(tmp_path, max_new_tokens=40, llm=llm).token_ids == plain[0]
    asked = [Request(one, 40, strategy, options, **HOW) for one in prompts]
    with Scheduler(llm) as scheduler:
        tickets = [scheduler.submit(asked[0])]
        tickets[0].wait()
        tickets += [scheduler.submit(one) for one in asked[1:]]
        assert [one.result.token_ids for one in tickets if one.wait()] == plain
        assert scheduler.figures().reused
