"""Which weights a model of a native family must have: a `Layout`, from its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from tokenswift.kernels.weights import Mixture
from tokenswift.kv.states import Recurrence
from tokenswift.loader.experts import expert_shapes
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import (
    DOWN,
    FULL,
    GATE,
    KEY,
    OUTPUT,
    QUERY,
    SLIDING,
    UP,
    VALUE,
    Family,
)
from tokenswift.loader.recurrent import mlp_width, recurrence_of, recurrent_shapes

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
SINKS = "self_attn.sinks"
#: stands for the frequencies of a layer that knows no positions
NO_ROPE = -1


class LayoutConfig(Protocol):
    """A config of a native family, of :func:`config.completed` or transformers'. Fields that the
    family alone has are looked for where its defaults name them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool


class _Numbers:
    """Numbers of a config, where its family has them.

    Args:
        config: the config.
        family: its family.
    """

    def __init__(self, config: LayoutConfig, family: Family) -> None:
        self._config = config
        self._family = family

    def get(self, name: str, default: float) -> float:
        """A number; ``default`` where the family has none by this name, or the config says None."""
        value = getattr(self._config, name, None) if name in self._family.defaults else None
        return default if value is None else value


def layout_of(config: LayoutConfig, tied: bool | None = None) -> Layout:
    """What the native decoder is made of.

    Args:
        config: of one of its families.
        tied: whether the LM head is the embedding; None: as the config says.
    """
    family = FAMILIES[config.model_type]
    numbers = _Numbers(config, family)
    width = head_width(config)
    window = _window(config, numbers)
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    scale = numbers.get("query_pre_attn_scalar", width) ** -0.5
    return Layout(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=mlp_width(config, int(numbers.get("intermediate_size", 0))),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=width,
        eps=_eps(config, numbers),
        scale=float(numbers.get("attention_multiplier", scale)),
        windows=windows,
        tied=bool(config.tie_word_embeddings) if tied is None else tied,
        biased=_biased(config, family),
        ropes=_ropes(config, family, windows, kinds),
        embedding=_embedding_scale(config, numbers, family),
        residual=numbers.get("residual_multiplier", 1.0),
        logits=numbers.get("logits_scaling", 1.0) / numbers.get("logit_scale", 1.0),
        score_cap=numbers.get("attn_logit_softcapping", 0.0),
        logit_cap=numbers.get("final_logit_softcapping", 0.0),
        mixture=_mixture(numbers, family),
        gate_limit=numbers.get("swiglu_limit", 0.0),
        gate_slope=numbers.get("swiglu_alpha", 1.0),
        dense_layers=_dense_layers(config, numbers, family),
        rotated=0 if rotated_width(config) == width else rotated_width(config),
        recurrence=recurrence_of(config, family, config.hidden_size),
        recurrent=_recurrent_layers(family, kinds),
    )


def _embedding_scale(config: LayoutConfig, numbers: _Numbers, family: Family) -> float:
    """What embeddings are multiplied with."""
    if family.scales_embeddings:
        return config.hidden_size**0.5
    return numbers.get("embedding_multiplier", 1.0)


def _recurrent_layers(family: Family, kinds: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the layers that are recurrent, by the kind of each layer."""
    if not family.recurrent:
        return ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == family.recurrent)


def _eps(config: LayoutConfig, numbers: _Numbers) -> float:
    """What norms add to a variance."""
    for name in ("layer_norm_eps", "norm_eps"):
        value = numbers.get(name, 0.0)
        if value:
            return float(value)
    return float(getattr(config, "rms_norm_eps", 0.0))


def _mixture(numbers: _Numbers, family: Family) -> Mixture | None:
    """How rows go through experts; None: they do not."""
    fields = family.experts
    if fields is None:
        return None
    shared = int(numbers.get(fields.shared, 0))
    return Mixture(
        experts=int(numbers.get(fields.count, 0)),
        used=int(numbers.get("num_experts_per_tok", 0)),
        inner=int(numbers.get(fields.width, 0)),
        shared=shared,
        shared_gate=shared > 0,
        renormalised=bool(numbers.get("norm_topk_prob", fields.renormalised)),
        biased=fields.biased,
        sigmoid=fields.sigmoid,
        choice_bias=fields.choice_bias,
    )


def _dense_layers(config: LayoutConfig, numbers: _Numbers, family: Family) -> tuple[int, ...]:
    """Layers of a mixture that have one MLP."""
    if family.experts is None:
        return ()
    step = int(numbers.get("decoder_sparse_step", 1))
    first = int(numbers.get("num_dense_layers", 0))
    named = (*range(first), *(getattr(config, "mlp_only_layers", None) or ()))
    layers = range(config.num_hidden_layers)
    return tuple(layer for layer in layers if layer in named or (layer + 1) % step)


def _window(config: LayoutConfig, numbers: _Numbers) -> int:
    """Newest keys that a token of a layer with a window sees; 0 is all. A window that no text can
    leave is none; LongRoPE's positions are the only ones that nothing extends."""
    window = int(numbers.get("sliding_window", 0)) if numbers.get("use_sliding_window", True) else 0
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and window >= limit and rope.get("rope_type") == "longrope":
        return 0
    return window


def _biased(config: LayoutConfig, family: Family) -> tuple[str, ...]:
    """Projections that have biases."""
    attention = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    attention = attention or ("qkv_bias" in family.defaults and getattr(config, "qkv_bias", True))
    mlp = getattr(config, "mlp_bias", False)
    return tuple(name for name in family.biased if (mlp if name.startswith("mlp.") else attention))


def _ropes(
    config: LayoutConfig, family: Family, windows: Sequence[int], kinds: Sequence[str]
) -> tuple[int, ...]:
    """The set of rotary frequencies of each layer; empty: one for all."""
    rotated = [1] * config.num_hidden_layers
    if "no_rope_layers" in family.defaults:
        rotated = getattr(config, "no_rope_layers", None) or rotated
    if not family.full_layers_rotate:
        rotated = [int(window > 0) for window in windows]
    sliding_set = len(family.rope_bases) - 1
    ropes: list[int] = []
    for kind, rotates in zip(kinds, rotated, strict=False):
        if not rotates:
            ropes.append(NO_ROPE)
        else:
            ropes.append(0 if kind == FULL else sliding_set)
    return tuple(ropes) if any(ropes) else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What a native decoder is made of, by the names of transformers' configs.

    Attributes:
        eps: what norms add to a variance.
        scale: what attention scores are multiplied with.
        windows: newest keys that a token sees, by layer; 0 is all.
        tied: whether the LM head is the embedding.
        biased: projections that have biases.
        ropes: the set of rotary frequencies of each layer, -1 where nothing is rotated; empty: one
            for all.
        embedding, residual: what embeddings, and what attention and MLP add to a state, are
            multiplied with.
        logits: what logits are divided by.
        score_cap, logit_cap: caps of scores and logits by a tanh; 0: none.
        mixture: how rows go through experts; None: layers have one MLP.
        dense_layers: layers of a mixture that have one MLP all the same.
        rotated: numbers of a head that positions rotate, the first ones; 0: all.
        gate_limit, gate_slope: of a clamped SwiGLU (`kernels.weights.Shape`); 0 and 1: none.
        recurrence: sizes of recurrent layers; None: there are none.
        recurrent: the numbers of these layers.
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
    mixture: Mixture | None = None
    dense_layers: tuple[int, ...] = ()
    rotated: int = 0
    gate_limit: float = 0.0
    gate_slope: float = 1.0
    recurrence: Recurrence | None = None
    recurrent: tuple[int, ...] = ()

    def stated(self) -> dict[str, object]:
        """All of it by name, for digests; without what earlier versions did not know, where it is
        as they had it."""
        fields = asdict(self)
        if self.mixture is None:
            del fields["mixture"], fields["dense_layers"]
        else:
            for name in ("biased", "choice_bias"):
                if not fields["mixture"][name]:
                    del fields["mixture"][name]
        if not self.rotated:
            del fields["rotated"]
        if not self.gate_limit:
            del fields["gate_limit"], fields["gate_slope"]
        if self.recurrence is None:
            del fields["recurrence"], fields["recurrent"]
        return fields

    @property
    def family(self) -> Family:
        """What sets it apart from Llama's."""
        return FAMILIES[self.model_type]

    @property
    def in_turn(self) -> bool:
        """Whether checkpoints hold gate and up of experts row by row in turn."""
        experts = self.family.experts
        return experts is not None and experts.in_turn

    def experts_of(self, layer: int) -> Mixture | None:
        """How rows go through the experts of a layer; None: it has one MLP."""
        return None if layer in self.dense_layers else self.mixture

    def product_sizes(self) -> tuple[int, ...]:
        """Lengths of what enters products, which have to be even."""
        sizes = (self.hidden_size, self.intermediate_size)
        if self.recurrence is not None:
            sizes = (*sizes, self.recurrence.outputs)
        return sizes if self.mixture is None else (*sizes, self.mixture.inner, self.mixture.shared)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its weights."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, hidden),
            NORM: (hidden,),
        }
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, hidden)
        for number in range(self.num_hidden_layers):
            prefix = f"model.layers.{number}."
            mixture = self.experts_of(number)
            layer = self._layer_shapes(number)
            for name, shape in layer.items():
                if mixture is None or not name.startswith("mlp."):
                    shapes[prefix + name] = shape
            if mixture is not None:
                shapes.update(expert_shapes(prefix, mixture, hidden))
        return shapes

    def _layer_shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights of a layer."""
        hidden = self.hidden_size
        attends = number not in self.recurrent
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        parts: dict[str, tuple[int, ...]] = {
            GATE: (self.intermediate_size, hidden),
            UP: (self.intermediate_size, hidden),
            DOWN: (hidden, self.intermediate_size),
        }
        if attends:
            parts[QUERY] = (2 * queries if self.family.output_gate else queries, hidden)
            parts[KEY] = parts[VALUE] = (keys, hidden)
            parts[OUTPUT] = (hidden, queries)
        for name in self.family.norms:
            if name is not None:
                parts[name] = (hidden,)
        if attends and self.family.head_norms:
            all_heads = self.family.head_norms == "projection"
            parts["self_attn.q_norm"] = (queries if all_heads else self.head_dim,)
            parts["self_attn.k_norm"] = (keys if all_heads else self.head_dim,)
        shapes = {f"{name}.weight": shape for name, shape in parts.items()}
        for name in self.biased:
            if name in parts:
                shapes[f"{name}.bias"] = parts[name][:1]
        if self.family.sinks:
            shapes[SINKS] = (self.num_attention_heads,)
        if not attends and self.recurrence is not None:
            shapes.update(recurrent_shapes(self.recurrence, hidden))
        return shapes


class HeadsConfig(Protocol):
    """A config of any family, as far as it says how wide heads are."""

    hidden_size: int
    num_attention_heads: int


def head_width(config: HeadsConfig) -> int:
    """d, the width of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated_width(config: HeadsConfig) -> int:
    """How many numbers of a head positions rotate, the first ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head_width(config) * (rope.get("partial_rotary_factor") or 1.0))
