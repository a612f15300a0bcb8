"""The layer with which a model's own files draft (MTP): its drafts are those of a plain reference,
and change no token."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from tests.conftest import tiny_tokenizer
from tests.gguf_files import write
from tests.tiny import BYTES, build
from tokenswift import LLM, SamplingParams
from tokenswift.loader.drafting import GGUF_NAMES, LAYER
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.packing import Packing
from tokenswift.speculation.eagle.mtp import MtpModel

SIZES = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "initializer_range": 0.2,
}
TEXT = torch.randint(2, 250, (40,), generator=torch.Generator().manual_seed(2)).tolist()
ATTENDING = 1  # a layer of the model that attends, as the one that drafts does

pytestmark = pytest.mark.usefixtures("own_cache")


class Reference(torch.nn.Module):
    """The layer in plain torch, over a whole text at once."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        torch.manual_seed(7)
        config = deepcopy(model.config)
        config._attn_implementation = "eager"
        size = config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, ATTENDING)])
        self.norm = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self._rotary = Qwen3_5TextRotaryEmbedding(config)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3)
        self.requires_grad_(False).eval()

    def states(self, embeds: Tensor, states: Tensor) -> Tensor:
        """The layer's normed output, from embeddings of the next tokens and normed states, each
        (n, D)."""
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)]
        rows = self.fc(torch.cat(both, -1))[None]
        count = rows.shape[1]
        hidden = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self._rotary(rows, torch.arange(count)[None])
        return self.norm(self.layers[0](rows, angles, attention_mask=hidden))[0]


@torch.inference_mode()
def reference_drafts(
    model: Qwen3_5ForCausalLM, layer: Reference, text: list[int], count: int
) -> list[Tensor]:
    """Logits of the tokens behind a text and its next one, each next token the likeliest."""
    states = model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]
    tokens = [*text[1:], int(model.lm_head(states[-1]).argmax())]
    logits: list[Tensor] = []
    for _ in range(count):
        output = layer.states(model.model.embed_tokens(torch.tensor(tokens)), states)
        logits.append(model.lm_head(output[-1]))
        states = torch.cat([states, output[-1:]])
        tokens.append(int(logits[-1].argmax()))
    return logits


def drafts(model: MtpModel, target: NativeTarget, text: list[int], count: int) -> list[Tensor]:
    """The same by the drafter."""
    store = model.features()
    cache = target.new_cache(len(text) + 8)
    last = target.prefill(text, cache, features=store).hidden[-1:]
    token = int(target.logits(last).argmax())
    drained = store.drain()
    assert drained is not None
    own = model.new_cache()
    output = model.run([*text[1:], token], model.fuse(drained[1]), 0, own)
    own.commit(tuple(range(len(text))))
    logits = [model.logits(output[-1:])[0]]
    for step in range(count - 1):
        token = int(logits[-1].argmax())
        output = model.run([token], model.fed_back(output[-1:]), len(text) + step, own)
        own.commit((0,))
        logits.append(model.logits(output)[0])
    return logits


def folder_with(path: Path, model: Qwen3_5ForCausalLM, layer: Mapping[str, Tensor]) -> Path:
    """The model's folder, with tensors of a layer that drafts."""
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    file = path / "model.safetensors"
    named = {f"mtp.{name}": tensor.contiguous() for name, tensor in layer.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model() -> Qwen3_5ForCausalLM:
    return build("qwen3_5_text", {**BYTES, **SIZES})


@pytest.fixture(scope="module")
def reference(model: Qwen3_5ForCausalLM) -> Reference:
    return Reference(model)


def opened(path: Path) -> tuple[LLM, MtpModel]:
    llm = LLM(path, dtype="float32", heads="none")
    drafter = llm.resources.eagle
    assert isinstance(drafter, MtpModel)
    return llm, drafter


def differ(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[bool]:
    pairs = zip(first, second, strict=True)
    return [not torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs]


def test_its_drafts_are_those_of_the_reference(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    llm, drafter = opened(folder_with(tmp_path, model, reference.state_dict()))
    expected = reference_drafts(model, reference, TEXT, 4)
    assert differ(drafts(drafter, drafter.target, TEXT, 4), expected) == [False] * 4


def test_a_second_draft_from_a_state_without_its_norm_is_seen(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, drafter = opened(folder_with(tmp_path, model, reference.state_dict()))
    monkeypatch.setattr(drafter, "fed_back", drafter._entering)
    expected = reference_drafts(model, reference, TEXT, 2)
    assert differ(drafts(drafter, drafter.target, TEXT, 2), expected) == [False, True]


def test_norms_that_get_their_1_twice_are_seen(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_with(tmp_path, model, reference.state_dict())
    once = Packing.norm_weight

    def twice(self: Packing, name: str) -> Tensor:
        return once(self, name) + name.startswith("mtp.")

    monkeypatch.setattr(Packing, "norm_weight", twice)
    llm, drafter = opened(path)
    expected = reference_drafts(model, reference, TEXT, 1)
    assert differ(drafts(drafter, drafter.target, TEXT, 1), expected) == [True]


def test_it_drafts_under_auto_and_changes_no_token(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    path = folder_with(tmp_path, model, reference.state_dict())
    llm, _ = opened(path)
    for sampling in (SamplingParams(seed=3), SamplingParams(greedy=True, repetition_penalty=1.0)):
        generate = partial(llm.generate, TEXT, 80, sampling=sampling, ignore_eos=True)
        plain = generate("autoregressive")
        drafted = generate("auto")
        assert drafted.token_ids == plain.token_ids
    without = LLM(path, dtype="float32", heads="none", eagle="none")
    assert without.resources.eagle is None
    greedy = without.generate(TEXT, 80, sampling=sampling, ignore_eos=True)
    assert greedy.token_ids == plain.token_ids


def test_a_layer_of_another_kind_is_left_out_with_a_warning(
    model: Qwen3_5ForCausalLM,
    reference: Reference,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = {**reference.state_dict(), "embed_tokens.weight": torch.zeros(260, 32)}
    path = folder_with(tmp_path, model, tensors)
    with caplog.at_level(logging.WARNING, logger="tokenswift"):
        assert LLM(path, dtype="float32", heads="none").resources.eagle is None
    assert "a layer that drafts, of a kind that does not run here" in caplog.text


def test_a_gguf_file_brings_it_too(
    model: Qwen3_5ForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    names = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    names |= {f"{LAYER}{ours}.weight": f"{theirs}.weight" for ours, theirs in parts.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.state_dict().items():
        tensors[f"blk.4.{names[f'mtp.{name}']}"] = tensor + 1 if tensor.ndim == 1 else tensor
    fields = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = tmp_path / "model.gguf"
    write(path, deepcopy(model), fields=fields, more=tensors)
    llm, drafter = opened(path)
    expected = reference_drafts(model, reference, TEXT, 3)
    assert differ(drafts(drafter, drafter.target, TEXT, 3), expected) == [False] * 3
