"""A model and heads of every kind whose weights are written by hand, so that what they should draft
is known.

A token has a *class* and a variant: token ``3 c + u``. The class of the next token follows the
class of the token *before* the newest one (two cycles of classes take turns), and the newest one's
class says which variants are likely. So a hidden state holds two things, the newest class (first
half of its width) and the one before (second half), which an attention head in the upper layer
fetches from one position back, wherever the key stands in a cache. Heads that draft from such a
state are exact: their distribution is the model's own, up to rounding. Whatever is off by one
token, row, level or position drafts something else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.tiny import build
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads

CYCLE = 7
VARIANTS = 3
CLASSES = 2 * CYCLE
VOCAB = CLASSES * VARIANTS
HALF = 32
WIDTH = 2 * HALF
HEADS = 4
NORMED = math.sqrt(WIDTH / 2)  # a state's two ones after a norm
_FAR = 40.0  # SiLU(-40) is nothing


def successor(a: int) -> int:
    """The next class of the cycle that a class belongs to."""
    return a // CYCLE * CYCLE + (a + 1) % CYCLE


def classes(length: int) -> list[int]:
    """Classes of a scripted text: two interleaved cycles."""
    text = [0, CYCLE + 3]
    while len(text) < length:
        text.append(successor(text[-2]))
    return text[:length]


def prompt(length: int) -> list[int]:
    """Tokens of a scripted text, the variant that is likeliest after the class before."""
    text = classes(length)
    pairs = zip([0, *text], text, strict=False)
    return [VARIANTS * newest + before % VARIANTS for before, newest in pairs]


def _advance() -> Tensor:
    """(D, D): the next position's state from a state, (newest, before) → (successor of before,
    newest)."""
    step = torch.zeros(WIDTH, WIDTH)
    for c in range(CLASSES):
        step[successor(c), HALF + c] = 1.0
        step[HALF + c, c] = 1.0
    return step


def lm_head(sure: bool) -> Tensor:
    """Rows (V, D): the class from the second half, the variant from the first."""
    rows = torch.zeros(VOCAB, WIDTH)
    for c in range(CLASSES):
        for u in range(VARIANTS):
            rows[VARIANTS * successor(c) + u, HALF + c] = 30.0
        for token in range(VOCAB):
            rank = (token - c) % VARIANTS
            rows[token, c] = -25.0 * (rank > 0) if sure else -0.4 * rank
    return rows / NORMED


@torch.no_grad()
def scripted_model(sure: bool = True) -> Any:
    """The model; ``sure``: one likely variant, else three about equally likely ones."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = build("qwen2", sizes)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    for token in range(VOCAB):
        model.model.embed_tokens.weight[token, token // VARIANTS] = 1.0
    model.lm_head.weight.copy_(lm_head(sure))
    attention = model.model.layers[1].self_attn
    width = attention.head_dim
    angles = 8.0 ** (-torch.arange(0, width, 2) / width)
    turned = torch.cat([angles.cos(), -angles.sin()])  # as if the query stood one position earlier
    plain = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)])
    attention.q_proj.bias.copy_(60.0 * turned.repeat(2))
    attention.k_proj.bias.copy_(plain)
    norm = math.sqrt(WIDTH)  # of an embedding after the layer's norm
    attention.v_proj.weight[:, :HALF].copy_(torch.eye(width) / norm)
    attention.o_proj.weight[HALF:, :width].copy_(torch.eye(width))
    return model.requires_grad_(False)


@torch.no_grad()
def scripted_heads(kind: str, count: int = HEADS) -> Heads:
    """Heads that draft what the model of :func:`scripted_model` would say."""
    config = HeadsConfig(kind, count, WIDTH, VOCAB, eps=1e-12)
    heads = Heads(config).eval()
    weights = heads.state_dict()
    if kind == "linear":
        weights = _linear(count)
    elif kind == "conditioned":
        weights |= _conditioned()
    else:
        weights = _medusa(count)
    heads.load_state_dict(weights)
    return heads.requires_grad_(False)


def _linear(count: int) -> dict[str, Tensor]:
    """Each head's states have signs of their own, which its last norm takes off: none can stand in
    for another."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    before = torch.ones(WIDTH)
    for i in range(count):
        signs = 1.0 - 2.0 * torch.randint(2, (WIDTH,), generator=generator)
        step = signs[:, None] * _advance() * before
        weights[f"layers.{i}.linear.weight"] = (step - torch.eye(WIDTH)) / NORMED
        weights[f"layers.{i}.input_layernorm.weight"] = torch.ones(WIDTH)
        weights[f"layers.{i}.post_layernorm.weight"] = signs
        before = signs
    return weights


def _conditioned() -> dict[str, Tensor]:
    """The newest class is the drafted token's, the one before it comes from the state before."""
    step = torch.zeros(WIDTH, 3 * WIDTH)
    for c in range(CLASSES):
        step[c, 2 * WIDTH + c] = NORMED / math.sqrt(WIDTH)
        step[HALF + c, c] = 1.0
    return {"layers.0.linear.weight": step, "layers.0.linear.bias": torch.zeros(WIDTH)}


def _medusa(count: int) -> dict[str, Tensor]:
    """One SiLU block makes the state whole; what it is added to is scaled to nothing."""
    high = _silu_inverse(NORMED)
    small = 1e-6
    weights = {}
    step = torch.eye(WIDTH)
    for i in range(count):
        step = _advance() @ step
        weights[f"layers.{i}.final_norm.weight"] = torch.full((WIDTH,), small)
        weights[f"layers.{i}.blocks.0.weight"] = step * (high + _FAR) / (small * NORMED)
        weights[f"layers.{i}.blocks.0.bias"] = torch.full((WIDTH,), -_FAR)
    return weights


def _silu_inverse(value: float) -> float:
    """The argument for which SiLU is a positive value, by bisection."""
    low = 0.0
    high = _FAR
    for _ in range(80):
        middle = (low + high) / 2
        if middle / (1 + math.exp(-middle)) < value:
            low = middle
        else:
            high = middle
    return high
