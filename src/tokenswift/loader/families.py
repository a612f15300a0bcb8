"""Families of the native decoder, and the layers that they name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenswift.loader.schema import CAPS, MULTIPLIERS

# One decoder, and for each family what sets it apart, as data. To add one: give it an entry in
# FAMILIES with the fields of its config and their defaults, as its configuration class in
# transformers has them, and what of the switches of Family it needs. Numbers that a config may hold
# (multipliers, caps, windows, layers without positions) are read by layout_of where the family's
# defaults name them. Where GGUF files of it exist, say what they call it (gguf) and its numbers
# (keys), and whether their rows pair neighbours (turned). Then add it, tiny, to tests/tiny.py: the
# tests hold it against transformers. What no switch expresses stays with transformers.

#: projections of a layer
PROJECTIONS = tuple(f"self_attn.{part}_proj" for part in "qkvo")
PROJECTIONS += tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
#: kinds of layers
FULL, SLIDING = "full_attention", "sliding_attention"
SILU, GELU = "silu", "gelu_pytorch_tanh"
#: norms before and behind attention, before and behind the MLP
BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
FOUR = ("input_layernorm", BEHIND[1], "pre_feedforward_layernorm", BEHIND[3])


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family's decoder apart from Llama's.

    Attributes:
        usual: fields of its config that its forward pass depends on, and their defaults.
        biased: projections that may have biases.
        norms: names of the norms before and behind attention, before and behind the MLP; None:
            there is none.
        head_norms: of queries and keys: "" (none), "head", or "projection" (over all heads
            together).
        plus_one: whether norms multiply by 1 + their weight.
        activation: of the MLP.
        full_every: one layer in so many sees everything where the config does not say which; 0:
            none does.
        bases: of the rotary frequencies; two where layers with windows have their own.
        gguf: what GGUF files call it; "" where none of its own.
        turned: whether the files' rows of queries and keys pair neighbours.
        keys: numbers of the config by what the files call them.
        parallel: whether attention and MLP take in the same norm, a LayerNorm: of states without
            their mean.
        neighbours: whether positions turn neighbours of a head's numbers, not those of its halves.
        full_turns: whether layers that see everything know positions.
        largest: layers of a model whose scores are scaled by its width a head instead of the head's
            (Gemma).
    """

    usual: dict[str, Any]
    biased: tuple[str, ...] = ()
    norms: tuple[str | None, ...] = BEFORE
    head_norms: str = ""
    plus_one: bool = False
    activation: str = SILU
    full_every: int = 1
    bases: tuple[float, ...] = (10_000.0,)
    gguf: str = ""
    turned: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    parallel: bool = False
    neighbours: bool = False
    full_turns: bool = True
    largest: int = 0


#: what files have to say; where one does not, transformers' own default may be another
_SAID: dict[str, Any] = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    + (
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "bos_token_id",
        "eos_token_id",
    ),
    ...,
) | {"hidden_act": SILU, "tie_word_embeddings": False}
_LLAMA = _SAID | {"num_key_value_heads": None, "head_dim": None}
_MISTRAL = _SAID | {"head_dim": None, "sliding_window": 4096}
_QWEN = _SAID | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN |= {"layer_types": None, "bos_token_id": None, "eos_token_id": None}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {"sliding_window": 4096, "layer_types": None}
_SMOLLM = (
    _SAID | _BIASES | {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None}
)
_SMOLLM |= {"use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": True}
_OLMO = _SAID | {"attention_bias": False}
_OLMOS: dict[str, Any] = {"biased": PROJECTIONS[:4], "norms": BEHIND, "head_norms": "projection"}
_GRANITE = _SAID | _BIASES | dict.fromkeys(MULTIPLIERS, 1.0)
_COHERE = _SAID | _WINDOWS | {"sliding_window_pattern": None, "attention_bias": False}
_COHERE |= {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
del _COHERE["rms_norm_eps"]
_COHERES: dict[str, Any] = {"parallel": True, "neighbours": True, "full_turns": False}
_COHERES["keys"] = {"logit_scale": "logit_scale", "layer_norm_eps": "attention.layer_norm_epsilon"}
_CAPS = {name: name for name in CAPS}
_GEMMA = (
    _SAID | _WINDOWS | {"hidden_act": GELU, "hidden_activation": GELU, "tie_word_embeddings": True}
)
_GEMMA |= {"head_dim": 256, "query_pre_attn_scalar": 256, "attention_bias": False}
_GEMMA |= {"use_bidirectional_attention": False}
_GEMMA_2 = _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA_3 = _GEMMA | dict.fromkeys(_CAPS) | {"sliding_window_pattern": None}
_GEMMAS: dict[str, Any] = {
    "biased": PROJECTIONS[:4],
    "norms": FOUR,
    "plus_one": True,
    "activation": GELU,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA | _BIASES, PROJECTIONS, gguf="llama", turned=True),
    "mistral": Family(_MISTRAL, full_every=0, turned=True),
    "ministral": Family(_MISTRAL | {"layer_types": None}, full_every=0),
    "qwen2": Family(_QWEN, PROJECTIONS[:3], gguf="qwen2"),
    "qwen3": Family(
        _QWEN | {"head_dim": 128, "attention_bias": False},
        PROJECTIONS[:4],
        head_norms="head",
        gguf="qwen3",
    ),
    "smollm3": Family(_SMOLLM, PROJECTIONS, bases=(2e6,), gguf="smollm3", turned=True),
    "granite": Family(_GRANITE, PROJECTIONS, gguf="granite", turned=True, keys=MULTIPLIERS),
    "olmo2": Family(_OLMO, **_OLMOS, gguf="olmo2"),
    "olmo3": Family(_OLMO | _WINDOWS, **_OLMOS, full_every=4, bases=(5e5, 5e5)),
    "cohere2": Family(
        _COHERE,
        PROJECTIONS[:4],
        norms=(*BEFORE[:2], None, None),
        full_every=4,
        gguf="cohere2",
        **_COHERES,
    ),
    "gemma2": Family(_GEMMA_2, **_GEMMAS, full_every=2, gguf="gemma2", keys=_CAPS, largest=46),
    "gemma3_text": Family(
        _GEMMA_3,
        **_GEMMAS,
        head_norms="head",
        full_every=6,
        bases=(1e6, 1e4),
        gguf="gemma3",
        largest=62,
    ),
}
