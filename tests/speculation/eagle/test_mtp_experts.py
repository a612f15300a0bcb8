"""The layer with which a mixture's own files draft: the same layer, whose rows go through
experts; a narrow draft head; and drafts that training makes better."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from tests.gguf_files import write
from tests.speculation.eagle.mtp_reference import (
    SIZES,
    TEXT,
    Reference,
    differ,
    drafts,
    folder_with,
    opened,
    reference_drafts,
)
from tests.tiny import BYTES, build, predictable
from tokenswift import SamplingParams
from tokenswift.loader.drafting import GGUF_NAMES, LAYER
from tokenswift.speculation.eagle import mtp
from tokenswift.speculation.eagle.mtp import MtpModel

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model() -> Qwen3_5MoeForCausalLM:
    return build("qwen3_5_moe_text", {**BYTES, **SIZES, **EXPERTS})


@pytest.fixture(scope="module")
def reference(model: Qwen3_5MoeForCausalLM) -> Reference:
    return Reference(model)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors as some checkpoints have them: a matrix for each expert's projection."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, is_joint, part = name.partition("experts.")
        if not is_joint or not part.endswith(("gate_up_proj", "down_proj")):
            split[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for projection, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                split[f"{before}experts.{expert}.{projection}.weight"] = rows.contiguous()
    return split


@pytest.mark.parametrize("names", [dict, one_by_one], ids=["all experts", "each expert"])
def test_its_drafts_are_those_of_the_reference(
    model: Qwen3_5MoeForCausalLM, reference: Reference, names: type[dict], tmp_path: Path
) -> None:
    _, drafter = opened(folder_with(tmp_path, model, names(reference.state_dict())))
    expected = reference_drafts(model, reference, TEXT, 4)
    assert differ(drafts(drafter, drafter.target, TEXT, 4), expected) == [False] * 4


def test_drafts_of_experts_change_no_token(
    model: Qwen3_5MoeForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    llm, _ = opened(folder_with(tmp_path, model, reference.state_dict()))
    for sampling in (SamplingParams(seed=3), GREEDY):
        generate = partial(llm.generate, TEXT, 80, sampling=sampling, ignore_eos=True)
        assert generate("auto").token_ids == generate("autoregressive").token_ids


GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def test_a_gguf_file_brings_it_too(
    model: Qwen3_5MoeForCausalLM, reference: Reference, tmp_path: Path
) -> None:
    names = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    names |= {f"{LAYER}{ours}.weight": f"{theirs}.weight" for ours, theirs in GGUF_PARTS.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            tensors["blk.4.ffn_gate_exps.weight"] = gate.contiguous()
            tensors["blk.4.ffn_up_exps.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            tensors["blk.4.ffn_down_exps.weight"] = tensor
        else:
            tensors[f"blk.4.{names[f'mtp.{name}']}"] = tensor + 1 if tensor.ndim == 1 else tensor
    fields = {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    path = tmp_path / "model.gguf"
    write(path, deepcopy(model), fields=fields, more=tensors)
    _, drafter = opened(path)
    expected = reference_drafts(model, reference, TEXT, 3)
    assert differ(drafts(drafter, drafter.target, TEXT, 3), expected) == [False] * 3


# ---- a narrow draft head -------------------------------------------------------------------------


def test_of_a_large_vocabulary_the_frequent_tokens_are_drafted(
    model: Qwen3_5MoeForCausalLM,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits are those of the whole head, of the tokens that stand first in it; others are never
    drafted, and the text stays the same."""
    path = folder_with(tmp_path, model, reference.state_dict())
    generate = partial(opened(path)[0].generate, TEXT, 60, sampling=GREEDY, ignore_eos=True)
    plain = generate("autoregressive").token_ids
    monkeypatch.setattr(mtp, "DRAFTED", 64)
    llm, drafter = opened(path)
    assert drafter.subset is not None
    (first,) = drafts(drafter, drafter.target, TEXT, 1)
    assert first.shape == (64,)
    (expected,) = reference_drafts(model, reference, TEXT, 1)
    assert differ([first], [expected[:64]]) == [False]
    assert max(plain) >= 64
    generate = partial(llm.generate, TEXT, 60, sampling=GREEDY, ignore_eos=True)
    assert generate("auto").token_ids == plain


def test_a_narrow_head_of_248_thousand_tokens(tmp_path: Path) -> None:
    """The vocabulary of Qwen 3.5."""
    sizes = {**BYTES, **SIZES, **EXPERTS, "vocab_size": 248_320, "hidden_size": 16}
    large = build("qwen3_5_moe_text", sizes)
    layer = Reference(large)
    llm, drafter = opened(folder_with(tmp_path, large, layer.state_dict()))
    (first,) = drafts(drafter, drafter.target, TEXT, 1)
    assert first.shape == (mtp.DRAFTED,)
    (expected,) = reference_drafts(large, layer, TEXT, 1, named=BYTES["vocab_size"])
    assert differ([first], [expected[: mtp.DRAFTED]]) == [False]
    generate = partial(llm.generate, TEXT, 24, sampling=GREEDY, ignore_eos=True)
    assert generate("auto").token_ids == generate("autoregressive").token_ids


# ---- training ------------------------------------------------------------------------------------

HOT = SamplingParams(temperature=1.0, repetition_penalty=1.0)


def train(model: Qwen3_5MoeForCausalLM, layer: Reference, texts: Tensor, steps: int) -> None:
    """Train the layer on texts of the model's: to choose what stands two tokens on."""
    with torch.no_grad():
        states = model.model(input_ids=texts, use_cache=False).last_hidden_state
        embeds = model.model.embed_tokens(texts)
    layer.requires_grad_(True)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for step in range(steps):
        row = step % len(texts)
        output = layer.states(embeds[row, 1:], states[row, :-1])
        loss = F.cross_entropy(model.lm_head(output[:-1]), texts[row, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    layer.requires_grad_(False)


def share_right(drafter: MtpModel, text: list[int]) -> float:
    """The share of a text's tokens that the layer finds likeliest two tokens before."""
    store = drafter.features()
    drafter.target.prefill(text, drafter.target.new_cache(len(text)), features=store)
    drained = store.drain()
    assert drained is not None
    states = drafter.fuse(drained[1])[:-2]
    logits = drafter.logits(drafter.run(text[1:-1], states, 0, drafter.new_cache()))
    return float((logits.argmax(-1) == torch.tensor(text[2:])).float().mean())


def test_training_on_the_models_own_text_makes_drafts_better(
    model: Qwen3_5MoeForCausalLM, tmp_path: Path
) -> None:
    """For a second or two; what is measured is a text that was not trained on. (A text of random
    weights alone has nothing to learn.)"""
    writer = predictable(deepcopy(model))
    layer = Reference(writer)
    llm, drafter = opened(folder_with(tmp_path / "before", writer, layer.state_dict()))
    prompts = [TEXT[: 1 + number] for number in range(33)]
    written = llm.generate_many(prompts, 60, "autoregressive", sampling=HOT, ignore_eos=True)
    *texts, unseen = [text.token_ids for text in written]
    before = share_right(drafter, unseen)
    train(writer, layer, torch.tensor(texts), 200)
    llm, drafter = opened(folder_with(tmp_path / "after", writer, layer.state_dict()))
    after = share_right(drafter, unseen)
    assert after > before + 0.2, (before, after)
    generate = partial(llm.generate, TEXT, 60, sampling=HOT, ignore_eos=True)
    assert generate("auto").token_ids == generate("autoregressive").token_ids
