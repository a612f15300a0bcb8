"""What training computes: the forward against transformers', the teacher against the sampler, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.conftest import tiny_model
from tests.train.test_train import V, frozen
from tokenswift.config import SamplingParams
from tokenswift.models.generic import final_norm
from tokenswift.sampling.choice import Sampler, repetition_penalty
from tokenswift.sampling.noise import Noise
from tokenswift.train.evaluate import head_rates
from tokenswift.train.loss import penalty
from tokenswift.train.selftext import Backbone, BatchCache, chances
from tokenswift.types import InputError

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


def test_attention_that_training_does_not_know_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes: dict[str, Any] = tiny.SIZES | {"head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()
    with pytest.raises(InputError, match="capped scores or sinks"):
        Backbone(model).hidden(torch.zeros(1, 4, dtype=torch.long))


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


def test_a_row_sees_exactly_its_last_tokens() -> None:
    base = frozen(tiny_model())
    text = torch.tensor([[-1, -1, 4, 5, 6, 7]])
    recent = base.recent(text, 1, 5, 3)
    assert recent is not None
    assert recent[0].tolist() == [[V, V, V], [V, V, 4], [V, 4, 5], [4, 5, 6], [5, 6, 7]]
    assert base.recent(text, 1, 5, 0) is None


def test_gradients_of_the_penalty_where_tokens_repeat() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 1, 1, 4], [2, 3, 2, 3], [7, 7, 7, 7]])
    once = torch.tensor([[1, 4], [2, 3], [7, 7]])
    weights = torch.randn(3, 20, dtype=torch.float64)
    out = penalty(logits, ids, 1.3)
    torch.testing.assert_close(out, repetition_penalty(logits, ids, 1.3))
    (mine,) = torch.autograd.grad((out * weights).sum(), logits)
    step = 1e-6
    for place in ((0, 1), (0, 4), (0, 5), (1, 3), (2, 7)):
        moved = logits.detach().clone()
        moved[place] += step
        rise = repetition_penalty(moved, once, 1.3) - repetition_penalty(logits.detach(), once, 1.3)
        rise = (rise * weights).sum() / step
        torch.testing.assert_close(mine[place], rise, rtol=1e-4, atol=1e-6)


class Knowing:
    """Heads that know the text: head i says the token i + 2 places on, read off the base state."""

    conditioned, own_lm_heads, count = True, True, 2

    def __init__(self, model: Any, text: torch.Tensor, hidden: torch.Tensor, shift: int = 0) -> None:
        self.model, self.text, self.hidden, self.shift = model, text, hidden, shift
        self.embeds: list[tuple[int, torch.Tensor]] = []

    def advance(self, i: int, previous: Any, base: torch.Tensor, embeds: Any) -> torch.Tensor:
        self.at = int((self.hidden - base).norm(dim=1).argmin())
        known = self.model.get_input_embeddings()(self.text[self.at + 1 + i])
        assert torch.equal(embeds[0], known)  # of the token just before the head's own
        return base

    def normed(self, i: int, states: torch.Tensor) -> torch.Tensor:
        return states

    def own_logits(self, i: int, states: torch.Tensor) -> torch.Tensor:
        at = self.at + 1 + i + self.shift
        return self.model.lm_head(final_norm(self.model)(self.hidden[at : at + 1]))


@torch.no_grad()
def test_rates_of_heads_that_know_the_law() -> None:
    """Heads with the model's own logits match always; with those of the next place they do not."""
    torch.manual_seed(1)
    model = tiny_model(initializer_range=0.3)
    backbone = Backbone(model)
    text = torch.randint(0, 256, (60,))
    hidden = backbone.hidden(text[None])[0]
    sampling = SamplingParams(seed=5, penalty_window=9)
    right: Any = Knowing(model, text, hidden)
    for row in head_rates(backbone, right, [text.tolist()], sampling):
        assert row["match"] == row["match3"] == 1.0 and row["positions"] == 57
    wrong: Any = Knowing(model, text, hidden, 1)
    assert head_rates(backbone, wrong, [text.tolist()], sampling)[0]["match"] < 0.5


@torch.no_grad()
def test_rates_are_of_the_choices_that_decoding_makes() -> None:
    """Text that the sampler chose with its noise: a head with the model's logits has every token of it."""
    model = tiny_model(initializer_range=0.3)
    sampling = SamplingParams(seed=11, penalty_window=9)
    sampler, text = Sampler(sampling, V), [1, 2, 3, 4]
    backbone = Backbone(model)
    while len(text) < 40:
        logits = backbone.logits(backbone.hidden(torch.tensor([text]))[:, -1])
        text += sampler.choose(logits, text, [[]])
    hidden = backbone.hidden(torch.tensor([text]))[0]
    noise = Noise(sampling.seed, V)
    from tokenswift.train.evaluate import _measure

    for at in range(3, 39):
        truth = torch.full((1, V), -10.0)
        truth[0, text[at + 1]] = 10.0  # a head that is sure of what decoding chose
        found = _measure(backbone, truth, torch.tensor(text), hidden, at, sampling, noise)
        assert found.tolist() == [1, 1, 1, 1]
