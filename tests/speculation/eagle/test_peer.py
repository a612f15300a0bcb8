"""The forward pass against another implementation: the model of the `speculators` package.

It is no requirement, as its pins exclude what is tested here. `make eagle-peer` installs it and
runs this file; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests import eagles
from tests.speculation.eagle.reference import EagleCache, EagleReference
from tokenswift.speculation.eagle.files import load_eagle

core = pytest.importorskip(
    "speculators.models.eagle3.core", reason="make eagle-peer installs speculators"
)

TEXT = 20
DEPTHS = 5


def peer(kind: str, sizes: dict[str, Any], **flags: Any) -> Any:
    """Their model with random weights."""
    configs, eagle3, greedy = (
        importlib.import_module(f"speculators.{name}")
        for name in ("config", "models.eagle3", "proposals.greedy")
    )
    layer = AutoConfig.for_model(kind, **sizes)
    layer._attn_implementation = "eager"
    model = core.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=40,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=configs.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=configs.VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **flags,
        )
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
        chosen = eagles.ids(eagles.config())
        model.t2d[chosen] = True
        model.d2t.copy_(chosen - torch.arange(40))
    return model


SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "norms": (
        "llama",
        {"attention_bias": True},
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "output": ("qwen3", {}, {"fc_norm": True, "norm_output": True}),
    "window": ("llama", {"layer_types": ["sliding_attention"], "sliding_window": 6}, {}),
}


@torch.no_grad()
def theirs(model: Any, tokens: Tensor, features: Tensor) -> list[Tensor]:
    """Their logits by depth."""
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    model(
        features[None],
        tokens[None],
        torch.zeros(1, len(tokens), dtype=torch.long),
        ttt_steps=DEPTHS,
    )
    return logits


@torch.no_grad()
def ours(reference: EagleReference, tokens: Tensor, features: Tensor, deep: int) -> list[Tensor]:
    """Logits by depth: all rows at once, then a chain from each, of the first ``deep`` depths."""
    positions = 1 + torch.arange(len(tokens))
    cache = EagleCache()
    hidden, logits = reference.step(tokens, reference.fuse(features), positions, cache)
    by_depth = [logits, *(torch.full_like(logits, torch.nan) for _ in range(deep - 1))]
    for t in range(len(tokens)):
        chain = EagleCache(cache.keys, cache.values, cache.positions)
        chain.cut(t + 1)
        state = hidden[t : t + 1]
        for depth in range(1, min(deep, len(tokens) - t)):
            token = tokens[t + depth : t + depth + 1]
            state, logits = reference.step(token, state, positions[t : t + 1] + depth, chain)
            by_depth[depth][t] = logits[0]
    return by_depth


@pytest.mark.parametrize("case", list(CASES))
def test_every_depth(case: str, tmp_path: Path) -> None:
    kind, sizes, flags = CASES[case]
    model = peer(kind, SIZES | sizes, **flags)
    model.save_pretrained(tmp_path)
    torch.manual_seed(4)
    tokens = torch.randint(0, 90, (TEXT,))
    features = torch.randn(TEXT, 3 * 32)
    loaded = load_eagle(tmp_path, eagles.target())
    assert loaded.config.feature_layers == (2, 4, 5)
    nothing = torch.full((90, 32), torch.nan)  # nothing of the target's is used
    # Theirs counts a window from the first depth's row, serving engines and this one from each row.
    deep = 1 if case == "window" else DEPTHS
    got = ours(EagleReference(loaded, nothing, nothing), tokens, features, deep)
    want = theirs(model, tokens, features)
    for depth in range(deep):
        last = TEXT - depth
        torch.testing.assert_close(got[depth][:last], want[depth][:last], atol=1e-5, rtol=1e-5)
        assert float(want[depth][:last].std()) > 0.5  # something to differ in
