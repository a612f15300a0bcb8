"""The layer with which a model's own files draft (MTP) in plain torch, with an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from tests.conftest import tiny_tokenizer
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tokenswift.speculation.eagle.mtp import MtpModel

Model: TypeAlias = Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM
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


class Reference(nn.Module):
    """The layer over a whole text at once.

    Args:
        model: whose layer it is like.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(7)
        config = deepcopy(model.config)
        config._attn_implementation = "eager"
        size = config.hidden_size
        layer_class = type(model.model.layers[ATTENDING])
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([layer_class(config, ATTENDING)])
        self.norm = Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self._rotary = deepcopy(model.model.rotary_emb)
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
    model: Model, layer: Reference, text: list[int], count: int, named: int | None = None
) -> list[Tensor]:
    """Logits of the tokens behind a text and its next one, each next token the likeliest.

    Args:
        named: how many tokens the tokenizer has, which alone the model chooses; None: all.
    """
    states = model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]
    tokens = [*text[1:], int(model.lm_head(states[-1])[:named].argmax())]
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


def folder_with(path: Path, model: Model, layer: Mapping[str, Tensor]) -> Path:
    """The model's folder, with tensors of a layer that drafts."""
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    file = path / "model.safetensors"
    named = {f"mtp.{name}": tensor.contiguous() for name, tensor in layer.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})
    return path


def opened(path: Path) -> tuple[LLM, MtpModel]:
    llm = LLM(path, dtype="float32", heads="none")
    drafter = llm.resources.eagle
    assert isinstance(drafter, MtpModel)
    return llm, drafter


def differ(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[bool]:
    pairs = zip(first, second, strict=True)
    return [not torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs]
