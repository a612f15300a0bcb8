"""Mixtures of experts: a dense model's MLP copied into all experts writes the dense model's
text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.models.decoder import NativeTarget

SAMPLING = {
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.0),
    "sampled": SamplingParams(seed=4, temperature=1.1, penalty_window=20),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "auto": {},
    "tokenswift": {"tree": (2, 2), "ngrams": 3, "draft": "partial", "budget": 24},
}


#: dense families, and mixtures whose other parts are theirs
PAIRS: dict[str, tuple[str, dict[str, object]]] = {
    "mistral": ("mixtral", {"num_local_experts": 6}),
    "qwen3": (
        "qwen3_moe-renormalised",
        {"mlp_only_layers": [], "moe_intermediate_size": 64, "head_dim": 16},
    ),
}


def upcycled(dense: Any, family: str, **changes: Any) -> Any:
    """A mixture whose experts all are the dense model's MLP, with a random router."""
    changes["rope_parameters"] = dense.config.rope_parameters
    mixture = tiny_model(family, seed=5, **changes)
    weights = dense.state_dict()
    for name, parameter in mixture.named_parameters():
        if ".experts." in name:
            layer = name.partition("experts.")[0]
            parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
            joint = torch.cat([weights[f"{layer}{part}_proj.weight"] for part in parts])
            parameter.data.copy_(joint)
        elif name in weights:
            parameter.data.copy_(weights[name])
    return mixture


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", PAIRS)
def test_a_mixture_of_equal_experts_writes_the_text_of_the_dense_model(
    family: str, strategy: str
) -> None:
    dense = tiny_model(family)
    mixture_family, changes = PAIRS[family]
    expected = LLM.from_model(dense, heads="none")
    llm = LLM.from_model(upcycled(dense, mixture_family, **changes), heads="none")
    assert isinstance(llm.target, NativeTarget)
    prompt = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    for sampling in SAMPLING.values():
        how: dict[str, Any] = {"sampling": sampling, "ignore_eos": True}
        plain = expected.generate(prompt, 60, "autoregressive", **how).token_ids
        text = llm.generate(prompt, 60, strategy, STRATEGIES[strategy], **how).token_ids
        assert text == plain
