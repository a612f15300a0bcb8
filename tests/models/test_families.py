"""Families that run through transformers' own forward: tiny random models of each, checked and
compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import SIZES, VOCAB, build
from tokenswift import LLM, SamplingParams
from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.base import Backend
from tokenswift.models import source, target
from tokenswift.models.generic import GenericTarget
from tokenswift.types import InputError

GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 16},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    # an activation that its experts pass over: natively none but SiLU is run
    "gpt_oss": {
        "head_dim": 8,
        "hidden_act": "gelu",
        "sliding_window": 16,
        "rope_parameters": PLAIN_ROPE,
        **EXPERTS,
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 48, "n_layer": 2, "n_head": 6}, "'gpt2'; valid: .* rotary positions"),
    "nemotron": ({}, "does not run through transformers' attention interface"),
}


def family_model(kind: str, **changes: Any) -> Any:
    """A tiny random causal LM of a family, float32; its embeddings are tied where the family's
    are."""
    return build(kind, SIZES, **{"pad_token_id": 0, **changes})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tokens_and_greedy_text_of_transformers(family: str) -> None:
    model = family_model(family, **FAMILIES[family])
    llm = LLM.from_model(model)
    assert isinstance(llm.target, GenericTarget)
    assert (16 in llm.target.windows) == ("sliding_window" in FAMILIES[family])
    prompt = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()
    greedy = SamplingParams(greedy=True, repetition_penalty=1.0)
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=30,
        eos_token_id=None,
    )[0, 30:].tolist()
    options = {"tree": (2, 2), "ngrams": 4, "budget": 24, "draft": "partial"}
    for params in (greedy, SamplingParams(seed=3, min_p=0.02, penalty_window=20)):
        plain = llm.generate(
            prompt, 30, "autoregressive", sampling=params, ignore_eos=True
        ).token_ids
        assert (
            plain
            == llm.generate(prompt, 30, "tokenswift", options, params, ignore_eos=True).token_ids
        )
        if params.greedy:
            assert plain == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_what_does_not_fit_is_refused_in_a_line(family: str) -> None:
    changes, message = REFUSED[family]
    with pytest.raises(InputError, match=message) as raised:
        LLM.from_model(family_model(family, **changes))
    assert "\n" not in str(raised.value)


def test_a_model_whose_tree_passes_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap of the scores that the attention function does not know of."""
    real = Backend.attend

    def uncapped(self: Backend, query: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        return real(self, query, replace(context, softcap=None))

    monkeypatch.setattr(Backend, "attend", uncapped)
    for where in (target, source):
        monkeypatch.setattr(where, "backend_for", lambda *_: Backend())
    monkeypatch.setattr(target, "fits", lambda *_: False)
    model = family_model("gemma2", **GEMMA, attn_logit_softcapping=0.5)
    with pytest.raises(
        InputError, match="not supported: logits of chunked prefill and tree passes differ"
    ):
        LLM.from_model(model)
