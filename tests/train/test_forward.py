"""What training computes: the forward against transformers', the teacher against the sampler, gradients."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.conftest import tiny_model
from tests.train.test_train import V, frozen
from tokenswift.config import SamplingParams
from tokenswift.models.generic import final_norm
from tokenswift.sampling.choice import Sampler
from tokenswift.train.states import Backbone, BatchCache, chances

SAMPLERS = [
    SamplingParams(min_p=0.0, repetition_penalty=1.0),
    SamplingParams(penalty_window=7),
    SamplingParams(min_p=0.0, top_p=0.6, temperature=0.7, penalty_window=30),
    SamplingParams(min_p=0.0, top_k=5, repetition_penalty=1.5, penalty_window=1),
    SamplingParams(min_p=0.0, eta_cutoff=0.02, repetition_penalty=1.1, penalty_window=11),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05, eta_cutoff=0.001),
    SamplingParams(greedy=True),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.no_grad()
def test_the_forward_is_transformers_own(family: str) -> None:
    """Windows of 16 and 20 tokens, texts of 50: at once, and after a prefill token by token."""
    model = tiny.tiny_model(family, "sdpa")
    tokens = torch.randint(0, tiny.VOCAB, (2, 50))
    want = model(tokens).logits
    backbone = Backbone(model)
    torch.testing.assert_close(backbone.logits(backbone.hidden(tokens)), want, rtol=1e-4, atol=1e-4)
    cache = BatchCache(50)
    parts = [backbone.hidden(tokens[:, :30], cache), backbone.hidden(tokens[:, 30:37], cache)]
    parts += [backbone.hidden(tokens[:, i : i + 1], cache) for i in range(37, 50)]
    torch.testing.assert_close(backbone.logits(torch.cat(parts, 1)), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_callers_model_is_left_as_it_was() -> None:
    model = tiny.tiny_model("mistral-sliding", "eager")
    tokens = torch.randint(0, tiny.VOCAB, (1, 40))
    want = model(tokens).logits
    norm, before = final_norm(model), model.config.to_dict()
    backbone = Backbone(model)
    backbone.hidden(tokens)
    assert model.config._attn_implementation == "eager" and model.config.to_dict() == before
    assert final_norm(model) is norm
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(tokens).logits, want)
    backbone.hidden(tokens)  # and side by side
    assert next(backbone.body.parameters()).data_ptr() == next(model.base_model.parameters()).data_ptr()


@pytest.mark.parametrize("sampling", SAMPLERS)
@torch.no_grad()
def test_text_and_teacher_come_from_the_samplers_distribution(sampling: SamplingParams) -> None:
    """Position by position against the sampler of decoding, over the whole vocabulary."""
    torch.manual_seed(3)
    model = tiny_model(initializer_range=0.3)
    text = torch.randint(0, 40, (1, 60))  # few tokens: many stand in the window
    hidden = Backbone(model).hidden(text)
    base = frozen(model)
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
        torch.testing.assert_close(chances(logits, text[:, : at + 1], sampling), want, rtol=1e-4, atol=1e-5)
