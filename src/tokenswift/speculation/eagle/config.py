"""What an EAGLE-3 drafter is made of: its sizes, and its tensors by canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from tokenswift.kernels.formats import Stored
from tokenswift.loader.config import ModelConfig
from tokenswift.loader.rope import rotary_of_config
from tokenswift.loader.rotary import Rotary

#: layers of the target that features are taken of
FEATURES = 3
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")


class TensorForm(NamedTuple):
    """A tensor of a drafter, as files have it.

    Attributes:
        folder: its name in safetensors files (``midlayer.`` may be ``layers.0.``).
        gguf: its name in GGUF files; "": these have none.
        shape: its sizes, a letter each, see :meth:`EagleConfig.shapes`.
        part: what it belongs to where not all drafters have it, see `EagleConfig.parts`.
    """

    folder: str
    gguf: str
    shape: str
    part: str = ""


#: tensors by canonical names
NAMES = {
    "embed": TensorForm("embed_tokens.weight", "token_embd.weight", "VH"),
    "fc": TensorForm("fc.weight", "fc.weight", "HF"),
    "features_norm": TensorForm(
        "input_norm.weight", "enc.output_norm.weight", "F", "norm_before_fc"
    ),
    "fc_norm.0": TensorForm("fc_norm.0.weight", "fc_norm.0.weight", "T", "fc_norm"),
    "fc_norm.1": TensorForm("fc_norm.1.weight", "fc_norm.1.weight", "T", "fc_norm"),
    "fc_norm.2": TensorForm("fc_norm.2.weight", "fc_norm.2.weight", "T", "fc_norm"),
    "input_norm": TensorForm("midlayer.input_layernorm.weight", "blk.0.attn_norm.weight", "H"),
    "hidden_norm": TensorForm("midlayer.hidden_norm.weight", "blk.0.attn_norm_2.weight", "H"),
    "q": TensorForm("midlayer.self_attn.q_proj.weight", "blk.0.attn_q.weight", "QW"),
    "k": TensorForm("midlayer.self_attn.k_proj.weight", "blk.0.attn_k.weight", "KW"),
    "v": TensorForm("midlayer.self_attn.v_proj.weight", "blk.0.attn_v.weight", "KW"),
    "o": TensorForm("midlayer.self_attn.o_proj.weight", "blk.0.attn_output.weight", "HQ"),
    "q_bias": TensorForm("midlayer.self_attn.q_proj.bias", "", "Q", "qkv_bias"),
    "k_bias": TensorForm("midlayer.self_attn.k_proj.bias", "", "K", "qkv_bias"),
    "v_bias": TensorForm("midlayer.self_attn.v_proj.bias", "", "K", "qkv_bias"),
    "o_bias": TensorForm("midlayer.self_attn.o_proj.bias", "", "H", "o_bias"),
    "q_norm": TensorForm("midlayer.self_attn.q_norm.weight", "", "d", "qk_norm"),
    "k_norm": TensorForm("midlayer.self_attn.k_norm.weight", "", "d", "qk_norm"),
    "post_norm": TensorForm(
        "midlayer.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", "H"
    ),
    "gate": TensorForm("midlayer.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", "IH"),
    "up": TensorForm("midlayer.mlp.up_proj.weight", "blk.0.ffn_up.weight", "IH"),
    "down": TensorForm("midlayer.mlp.down_proj.weight", "blk.0.ffn_down.weight", "HI"),
    "norm": TensorForm("norm.weight", "output_norm.weight", "H"),
    "lm_head": TensorForm("lm_head.weight", "output.weight", "DH"),
    "embed_proj": TensorForm("embed_proj.weight", "embed_proj.weight", "HT", "narrow"),
    "out_proj": TensorForm("out_proj.weight", "out_proj.weight", "TH", "narrow"),
    "d2t": TensorForm("d2t", "d2t", "D", "d2t"),
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
        heads: heads of the layer.
        kv_heads: its heads of keys and values.
        head_dim: width of a head.
        intermediate: width of the layer's MLP.
        eps: ε of the norms.
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
    rope: Mapping[str, object] = field(hash=False)
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
        config = ModelConfig(
            rope_parameters=dict(self.rope),
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=None,
        )
        return rotary_of_config(config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors, those of :data:`SHARED` included that it may have."""
        sizes = {
            "V": self.vocab,
            "D": self.draft_vocab,
            "T": self.target_hidden,
            "F": FEATURES * self.target_hidden,
            "H": self.hidden,
            "W": 2 * self.hidden,
            "Q": self.heads * self.head_dim,
            "K": self.kv_heads * self.head_dim,
            "d": self.head_dim,
            "I": self.intermediate,
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, form in NAMES.items():
            belongs = not form.part or form.part in self.parts
            is_replaced = name in SHARED and "narrow" in self.parts
            if belongs and not is_replaced:
                shapes[name] = tuple(sizes[letter] for letter in form.shape)
        return shapes


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A drafter's weights.

    Attributes:
        config: the drafter that they are of.
        tensors: tensors by canonical names, in the shapes of :meth:`EagleConfig.shapes` and the
            types of the files; matrices of GGUF files may be `Stored`. Without ``embed`` and
            ``lm_head`` the target's are used, of the LM head the rows of `d2t`.
        d2t: the target's ids of the drafter's tokens, (Vd,) int64; None: they are the same.
        name: what the checkpoint was asked for by.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor | Stored]
    d2t: Tensor | None
    name: str
