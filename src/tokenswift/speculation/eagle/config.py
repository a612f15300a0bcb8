"""What an EAGLE-3 drafter is made of: its sizes, and its tensors by canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from tokenswift.kernels.formats import Stored
from tokenswift.loader.rope import Rotary, rotary_of_config

#: layers of the target that features are taken of
FEATURES = 3
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")
#: tensors by canonical names: what safetensors files call them (``midlayer.`` may be ``layers.0.``)
#: and what GGUF files do; shapes by the sizes of :meth:`EagleConfig.shapes`; and the part that they
#: belong to, where not all drafters have it
NAMES = {
    "embed": ("embed_tokens.weight", "token_embd.weight", "VH", ""),
    "fc": ("fc.weight", "fc.weight", "HF", ""),
    "features_norm": ("input_norm.weight", "enc.output_norm.weight", "F", "norm_before_fc"),
    "fc_norm.0": ("fc_norm.0.weight", "fc_norm.0.weight", "T", "fc_norm"),
    "fc_norm.1": ("fc_norm.1.weight", "fc_norm.1.weight", "T", "fc_norm"),
    "fc_norm.2": ("fc_norm.2.weight", "fc_norm.2.weight", "T", "fc_norm"),
    "input_norm": ("midlayer.input_layernorm.weight", "blk.0.attn_norm.weight", "H", ""),
    "hidden_norm": ("midlayer.hidden_norm.weight", "blk.0.attn_norm_2.weight", "H", ""),
    "q": ("midlayer.self_attn.q_proj.weight", "blk.0.attn_q.weight", "QW", ""),
    "k": ("midlayer.self_attn.k_proj.weight", "blk.0.attn_k.weight", "KW", ""),
    "v": ("midlayer.self_attn.v_proj.weight", "blk.0.attn_v.weight", "KW", ""),
    "o": ("midlayer.self_attn.o_proj.weight", "blk.0.attn_output.weight", "HQ", ""),
    "q_bias": ("midlayer.self_attn.q_proj.bias", "", "Q", "qkv_bias"),
    "k_bias": ("midlayer.self_attn.k_proj.bias", "", "K", "qkv_bias"),
    "v_bias": ("midlayer.self_attn.v_proj.bias", "", "K", "qkv_bias"),
    "o_bias": ("midlayer.self_attn.o_proj.bias", "", "H", "o_bias"),
    "q_norm": ("midlayer.self_attn.q_norm.weight", "", "d", "qk_norm"),
    "k_norm": ("midlayer.self_attn.k_norm.weight", "", "d", "qk_norm"),
    "post_norm": ("midlayer.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", "H", ""),
    "gate": ("midlayer.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", "IH", ""),
    "up": ("midlayer.mlp.up_proj.weight", "blk.0.ffn_up.weight", "IH", ""),
    "down": ("midlayer.mlp.down_proj.weight", "blk.0.ffn_down.weight", "HI", ""),
    "norm": ("norm.weight", "output_norm.weight", "H", ""),
    "lm_head": ("lm_head.weight", "output.weight", "DH", ""),
    "embed_proj": ("embed_proj.weight", "embed_proj.weight", "HT", "narrow"),
    "out_proj": ("out_proj.weight", "out_proj.weight", "TH", "narrow"),
    "d2t": ("d2t", "d2t", "D", "d2t"),
}


class TargetConfig(Protocol):
    """What a drafter has to fit, as configs of transformers and `loader.config.completed` call
    it."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A drafter of one layer, and the target that it was trained for.

    Attributes:
        hidden: H, the width of the drafter's rows; its layer reads rows of 2 H.
        target_hidden: Ht, the target's width; features of a token are three rows of it.
        heads, kv_heads, head_dim, intermediate: of the layer.
        eps: of the norms.
        rope: ``rope_parameters`` of the drafter's positions.
        vocab: V, tokens of the target.
        draft_vocab: Vd, tokens that the drafter can name.
        feature_layers: the target's layers whose input is a feature, in the order of `fc`'s
            columns; the number of its layers stands for what leaves the last one.
        trained: positions of the texts that it was trained with, as its config says.
        norm_before_residual: the layer's residual is the normed feature.
        norm_output: what is fed back is the normed output (EAGLE 3.1).
        window: newest keys that a token sees, itself included, as it was trained; None is all.
        parts: those of :data:`NAMES` that not all drafters have: ``norm_before_fc``, a norm of all
            3 Ht features; ``fc_norm``, one of each layer's; ``qk_norm``, of heads of queries and
            keys; biases; ``narrow``, projections of the target's embeddings to H and of states to
            its LM head.
    """

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Mapping[str, Any] = field(hash=False)
    vocab: int
    draft_vocab: int
    feature_layers: tuple[int, ...]
    trained: int
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None
    parts: frozenset[str] = frozenset()

    def rotary(self) -> Rotary:
        """The drafter's own rotary positions."""
        settings = {"rope_parameters": dict(self.rope), "head_dim": self.head_dim}
        return rotary_of_config(SimpleNamespace(**settings, max_position_embeddings=None))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors, those of :data:`SHARED` included that it may have."""
        sizes = {"V": self.vocab, "D": self.draft_vocab, "T": self.target_hidden}
        sizes |= {"F": FEATURES * self.target_hidden, "H": self.hidden, "W": 2 * self.hidden}
        sizes |= {"Q": self.heads * self.head_dim, "K": self.kv_heads * self.head_dim}
        sizes |= {"d": self.head_dim, "I": self.intermediate}
        return {
            name: tuple(sizes[size] for size in shape)
            for name, (_, _, shape, part) in NAMES.items()
            if (not part or part in self.parts) and not ("narrow" in self.parts and name in SHARED)
        }


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights.

    Attributes:
        config: of the drafter.
        tensors: by canonical names, in the shapes of :meth:`EagleConfig.shapes`; without ``embed``
            and ``lm_head`` the target's are used, of the LM head the rows of `d2t`. Types are those
            of the files; matrices of GGUF files may be `Stored`.
        d2t: the target's ids of the drafter's tokens, (Vd,) int64; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor | Stored]
    d2t: Tensor | None
    name: str
