"""Which weights a model of a native family must have: a `Layout`, from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenswift.loader.families import FAMILIES, FULL, SLIDING, Family

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


#: fields of a :class:`Layout` that configs have by the same names
ALIKE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
ALIKE += ("num_attention_heads", "num_key_value_heads")


def layout_of(config: Any, tied: bool | None = None) -> Layout:
    """What the native decoder is made of.

    Args:
        config: of one of its families, of :func:`completed` or transformers'.
        tied: whether the LM head is the embedding; None: as the config says.
    """
    family, layers = FAMILIES[config.model_type], config.num_hidden_layers

    def number(name: str, usual: Any) -> Any:
        """A number of the config, where the family has it."""
        return getattr(config, name, usual) if name in family.defaults else usual

    window = (number("sliding_window", 0) or 0) if number("use_sliding_window", True) else 0
    kinds = getattr(config, "layer_types", None) or [SLIDING] * layers
    local, width = len(family.rope_bases) - 1, head_width(config)
    turned = number("no_rope_layers", None) or [1] * layers
    if not family.full_layers_rotate:
        turned = [int(window > 0 and kind == SLIDING) for kind in kinds]
    ropes = [
        (0 if kind == FULL else local) if turns else -1
        for kind, turns in zip(kinds, turned, strict=False)
    ]
    biases = {
        "self_attn": config.model_type == "qwen2" or getattr(config, "attention_bias", False),
        "mlp": getattr(config, "mlp_bias", False),
    }
    scale = number("attention_multiplier", number("query_pre_attn_scalar", width) ** -0.5)
    return Layout(
        **{name: getattr(config, name) for name in ALIKE},
        head_dim=width,
        eps=float(number("layer_norm_eps", None) or config.rms_norm_eps),
        scale=float(scale),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        tied=bool(config.tie_word_embeddings) if tied is None else tied,
        biased=tuple(name for name in family.biased if biases[name.partition(".")[0]]),
        ropes=tuple(ropes) if any(ropes) else (),
        embedding=config.hidden_size**0.5
        if family.plus_one
        else number("embedding_multiplier", 1.0),
        residual=number("residual_multiplier", 1.0),
        logits=number("logits_scaling", 1.0) / number("logit_scale", 1.0),
        score_cap=number("attn_logit_softcapping", None) or 0.0,
        logit_cap=number("final_logit_softcapping", None) or 0.0,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """What a native decoder is made of, by the names of transformers' configs.

    Attributes:
        eps: of the norms.
        scale: of attention scores.
        windows: newest keys that a token sees, by layer; 0 is all.
        tied: whether the LM head is the embedding.
        biased: projections that have biases.
        ropes: the set of rotary frequencies of each layer, -1 where nothing is turned; empty: one
            for all.
        embedding, residual: what embeddings, and what attention and MLP add to a state, are
            multiplied with.
        logits: what logits are divided by.
        score_cap, logit_cap: caps of scores and logits by a tanh; 0: none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int, ...]
    tied: bool
    biased: tuple[str, ...] = ()
    ropes: tuple[int, ...] = ()
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0

    @property
    def family(self) -> Family:
        """What sets it apart from Llama's."""
        return FAMILIES[self.model_type]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its weights."""
        queries, keys = (
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        wide, inner = self.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, wide), NORM: (wide,)}
        if not self.tied:
            found[HEAD] = (self.vocab_size, wide)
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, wide),
            "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide),
            "self_attn.o_proj": (wide, queries),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
            **{name: (wide,) for name in self.family.norms if name is not None},
        }
        if self.family.head_norms:
            whole = self.family.head_norms == "projection"
            layer["self_attn.q_norm"] = (queries if whole else self.head_dim,)
            layer["self_attn.k_norm"] = (keys if whole else self.head_dim,)
        named = {f"{name}.weight": shape for name, shape in layer.items()}
        named |= {f"{name}.bias": layer[name][:1] for name in self.biased}
        for number in range(self.num_hidden_layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in named.items()}
        return found


def head_width(config: Any) -> int:
    """d, the width of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
