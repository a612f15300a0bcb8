"""What an EAGLE-3 drafter is made of (Li et al. 2025), whichever form its checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenswift.loader.rope import Rotary, rotary_of_config

#: layers of the target that features are taken of
FEATURES = 3
#: the window of a drafter whose checkpoint names none
WINDOW = 2048
#: what the target gives where a checkpoint lacks it
SHARED = ("embed", "lm_head")


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
        feature_layers: the target's layers whose input is a feature, in the order of `fc`'s columns; the
            number of its layers stands for what leaves the last one.
        trained: positions of the texts that it was trained with, as its config says.
        norm_before_residual: the layer's residual is the normed feature.
        norm_before_fc: a norm of all 3 Ht features before `fc`.
        fc_norm: a norm of each layer's features before `fc`.
        norm_output: what is fed back is the normed output (EAGLE 3.1).
        window: newest keys that a token sees, itself included, as it was trained; None is all.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether heads of queries and keys have norms.
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
    feature_layers: tuple[int, int, int]
    trained: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def default_window(self) -> int:
        """Newest keys that a token sees where nobody says how many."""
        return min(self.window or WINDOW, self.trained)

    def rotary(self) -> Rotary:
        """The drafter's own rotary positions.

        Raises:
            InputError: a kind that depends on the text's length.
        """
        said = {"rope_parameters": dict(self.rope), "head_dim": self.head_dim}
        return rotary_of_config(SimpleNamespace(**said, max_position_embeddings=None))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, those of :data:`SHARED` included."""
        wide, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab, wide),
            "fc": (wide, FEATURES * self.target_hidden),
            "input_norm": (wide,),
            "hidden_norm": (wide,),
            "q": (queries, 2 * wide),
            "k": (keys, 2 * wide),
            "v": (keys, 2 * wide),
            "o": (wide, queries),
            "post_norm": (wide,),
            "gate": (inner, wide),
            "up": (inner, wide),
            "down": (wide, inner),
            "norm": (wide,),
            "lm_head": (self.draft_vocab, wide),
        }
        for there, names in (
            (self.qkv_bias, ("q", "k", "v")),
            (self.o_bias, ("o",)),
            (self.mlp_bias, ("gate", "up", "down")),
        ):
            found |= {f"{name}_bias": found[name][:1] for name in names if there}
        if self.qk_norm:
            found |= dict.fromkeys(("q_norm", "k_norm"), (self.head_dim,))
        if self.norm_before_fc:
            found["features_norm"] = (FEATURES * self.target_hidden,)
        if self.fc_norm:
            found |= {f"fc_norm.{part}": (self.target_hidden,) for part in range(FEATURES)}
        return found


def default_layers(layers: int) -> tuple[int, int, int]:
    """The layers that features are taken of where a checkpoint names none, of a target with so many."""
    return 2, layers // 2, layers - 3
