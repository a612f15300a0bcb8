"""What training computes: the teacher against the sampler."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import tiny_model
from tests.train.test_train import V, frozen, states_of
from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.models.generic import final_norm
from tokenswift.sampling.choice import Sampler
from tokenswift.train import loss

SAMPLERS = [
    SamplingParams(penalty_window=7),
    SamplingParams(min_p=0.0, top_p=0.6, temperature=0.7, penalty_window=30),
    SamplingParams(min_p=0.0, eta_cutoff=0.02, repetition_penalty=1.1, penalty_window=11),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05, eta_cutoff=0.001),
    SamplingParams(greedy=True),
]


@pytest.mark.parametrize("sampling", SAMPLERS)
@torch.no_grad()
def test_the_teacher_is_the_samplers_distribution(sampling: SamplingParams) -> None:
    """Position by position against the sampler of decoding, over the whole vocabulary."""
    torch.manual_seed(3)
    model = tiny_model(initializer_range=0.3)
    text = torch.randint(0, 40, (1, 60))  # few tokens: many stand in the window
    base = frozen(model)
    hidden = states_of(LLM.from_model(model), text[0].tolist())[None].float()
    recent = base.recent(text, 20, 40, sampling.window)
    shares, places = base.teacher(hidden[:, 20:], recent, sampling)
    teacher = torch.zeros(40, V).scatter_(1, places[0], shares[0])
    sampler = Sampler(sampling, V)
    for row, at in enumerate(range(20, 60)):
        logits = model.lm_head(final_norm(model)(hidden[0, at : at + 1]))
        scores = sampler.scores(logits.clone(), text[0, : at + 1].tolist(), [[]])
        want = scores.softmax(-1)
        if sampling.greedy:
            want = torch.nn.functional.one_hot(scores.argmax(-1), V).float()
        torch.testing.assert_close(teacher[row : row + 1], want, rtol=1e-4, atol=1e-5)


def test_of_many_tokens_a_step_looks_at_the_likeliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their rows are the LM head's, and so is the loss where the others hold nothing."""
    base = frozen(tiny_model())
    places = torch.randint(0, V, (2, 3, 4))
    assert base.among(places)[0] is base.rows
    for name, value in (("MANY", 16), ("OTHERS", 20)):
        monkeypatch.setattr(loss, name, value)
    rows, found = base.among(places)
    assert torch.equal(rows[found], base.rows[places]) and 20 <= len(rows) <= 20 + 2 + places.numel()
    shares, likeliest = base.teacher(torch.randn(1, 5, base.width), None, SamplingParams(**NEUTRAL))
    assert shares.shape == likeliest.shape == (1, 5, loss.LIKELIEST)
    torch.testing.assert_close(shares.sum(-1), torch.ones(1, 5))
