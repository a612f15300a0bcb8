"""What a model's files say of it: numbers within ranges, the config of a native family, the weights
it needs.

Files come from anybody. Every number that becomes a size, divides another or scales positions is
held against one schema (:func:`check_numbers`), of config.json and of GGUF metadata, before
anything is made of it: by its transformers' name, and named in messages as its file does.
:func:`completed` fills in what a config leaves out as its family has it; whatever is not known to
be taken as it stands (a field, a value of another type, positions of another kind) is left to
transformers. A :class:`Layout` says which weights there must be.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.types import InputError, shown

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
#: what is valid where there is an adapter
MERGED = "the model that it was merged into (PEFT's merge_and_unload, then save_pretrained)"
#: greatest number of tokens of a vocabulary; the largest of known models are 262,144
MOST_TOKENS = 1 << 20
MOST_LAYERS = 1024
#: greatest width of a head: the angles of the first positions are computed at once
MOST_WIDTH = 1024


def _whole(least: int, most: int) -> Any:
    return Annotated[int, Meta(ge=least, le=most)]


POSITIVE, NOT_NEGATIVE = (
    Annotated[float, Meta(gt=0, le=1e12)],
    Annotated[float, Meta(ge=0, le=1e12)],
)
SHARE = Annotated[float, Meta(gt=0, le=1)]
#: numbers of a row: what the kernels take
WIDTH, LENGTH = _whole(1, 1 << 18), _whole(1, 1 << 40)
#: positions: ``rope_parameters`` of a config, or ``rope_scaling`` as older ones have it; all may be
#: null
ROPE: dict[str, Any] = {
    **dict.fromkeys(
        ("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow"), POSITIVE
    ),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE),
    "original_max_position_embeddings": LENGTH,
    "partial_rotary_factor": SHARE,
}
#: fields that multiply states and scores: ours, and what GGUF files call them
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
#: fields of a config that are never null
SIZES: dict[str, Any] = {
    "vocab_size": _whole(1, MOST_TOKENS),
    **dict.fromkeys(("hidden_size", "intermediate_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "no_rope_layer_interval"), _whole(1, MOST_LAYERS)),
    "num_attention_heads": _whole(1, 1 << 14),
    "max_position_embeddings": LENGTH,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), SHARE),
    "max_window_layers": _whole(0, 1 << 20),
    **dict.fromkeys((*MULTIPLIERS, "query_pre_attn_scalar", "logit_scale"), POSITIVE),
}
#: and those that may be
OTHERS: dict[str, Any] = {
    "num_key_value_heads": _whole(1, 1 << 14),
    "head_dim": _whole(2, MOST_WIDTH),
    "sliding_window": _whole(0, 1 << 40),
    "num_labels": _whole(0, 1 << 16),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), bool),
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention"), bool),
    "sliding_window_pattern": _whole(1, MOST_LAYERS),
    "layer_types": list[str],
    "no_rope_layers": list[int],
    "bos_token_id": int,
    "eos_token_id": int | list[int],
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", *CAPS), POSITIVE),
}
ROPES = ("rope_parameters", "rope_scaling")


def _optional(fields: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, kind | None | UnsetType, UNSET) for name, kind in fields.items()]


_Rope = msgspec.defstruct("Rope", _optional(ROPE))
#: what is not given is not looked at
_Numbers: Any = msgspec.defstruct(
    "Numbers",
    [(name, kind | UnsetType, UNSET) for name, kind in SIZES.items()]
    + _optional({**OTHERS, **dict.fromkeys(ROPES, _Rope)}),
)


def check_numbers(
    said: Mapping[str, Any], where: str, called: Mapping[str, str] | None = None
) -> None:
    """Refuse numbers that no model has.

    Args:
        said: fields of a config; those that the schema does not name are not looked at.
        where: the file, for messages.
        called: what the file calls a field, where that is not transformers' name.
    Raises:
        InputError: naming the first value that is wrong, and what is valid.
    """
    for name in ROPES:  # of each kind of layers
        for part in said[name].values() if isinstance(said.get(name), Mapping) else ():
            if isinstance(part, Mapping):
                check_numbers({name: part}, where, called)
    found = converted(said, _Numbers, where, called)
    heads, kv = found.num_attention_heads or 0, found.num_key_value_heads or 1
    split = found.head_dim is None and heads and found.hidden_size
    share = found.hidden_size / heads if split else found.head_dim or 2
    if heads % kv:
        name, valid = "num_key_value_heads", f"a divisor of {heads}, the number of heads"
    elif share % 2 or share > MOST_WIDTH:
        name = "hidden_size" if split else "head_dim"
        valid = f"an even width of each of {heads} heads, up to {MOST_WIDTH:,}"
    else:
        return
    raise refusal(where, (called or {}).get(name, name), said[name], valid)


def converted(
    said: Mapping[str, Any], kind: Any, where: str, called: Mapping[str, str] | None = None
) -> Any:
    """Fields as a msgspec schema has them; the arguments are those of :func:`check_numbers`.

    Raises:
        InputError: naming the first value that is wrong, and what is valid.
    """
    try:
        return msgspec.convert(dict(said), kind)
    except msgspec.ValidationError as error:
        valid, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        value: Any = said
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        valid = valid.removeprefix("Expected ").partition(", got")[0].replace("`", "")
        raise refusal(where, (called or {}).get(name, name), value, valid) from None


def refusal(where: str, name: str, value: object, valid: str) -> InputError:
    """That a file says what no model's file says, in one line."""
    return InputError(f"{where}: {name} is {shown(value)}; valid: {valid}")


# ---- families ------------------------------------------------------------------------------------
#
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


# ---- the config of a family ----------------------------------------------------------------------

#: fields that a forward pass does not depend on, or that are looked at elsewhere
ASIDE = (
    "is_llama_config",
    "rope_interleaved",
    "transformers.js_config",
    "unk_token_id",
    "use_mrope",
)
ASIDE += (
    "_model_name_or_path",
    "unsloth_version",
    "unsloth_fixed",
    "use_cache",
    "initializer_range",
)
ASIDE += ("attention_dropout", "pad_token_id", "pretraining_tp", "architectures", "model_type")
ASIDE += ("transformers_version", "_name_or_path", "dtype", "torch_dtype", *ROPES, "rope_theta")
ASIDE += (
    "cache_implementation",
    "max_window_layers",
    "rope_local_base_freq",
    "_sliding_window_pattern",
)
ASIDE += ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct")
ASIDE += (
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
)
ASIDE += (
    "do_sample",
    "eta_cutoff",
    "max_length",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
#: parameters that each kind of positions needs besides its theta
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def completed(kind: str, said: Mapping[str, Any]) -> SimpleNamespace | None:
    """What a config says of a family's forward pass, by the attributes of transformers' own config:
    of what a file says and the family's defaults.

    Args:
        kind: the family.
        said: fields of the file, whose numbers were checked (:func:`check_numbers`).
    Returns:
        None where transformers may understand it otherwise.
    """
    family = FAMILIES[kind]
    usual = family.usual
    known = {"head_dim": None, **usual}  # read without a default
    if not said.keys() <= {*known, *ASIDE}:
        return None
    fields = copy.deepcopy(usual | {key: value for key, value in said.items() if key in known})
    if any(value is ... for value in fields.values()):
        return None
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if "head_dim" in usual and fields["head_dim"] is None:
        fields["head_dim"] = hidden // heads
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    rope = positions_said(said, fields["max_position_embeddings"], family.bases)
    activation = fields.get("hidden_activation", fields["hidden_act"])
    if rope is None or activation != family.activation or (kind == "llama" and hidden % heads):
        return None
    if fields.get("use_bidirectional_attention") or not _take_layer_types(fields, family):
        return None
    dtype = said.get("dtype") or said.get("torch_dtype")
    return SimpleNamespace(**fields, rope_parameters=rope, model_type=kind, dtype=dtype)


def activation_of(config: Any) -> Any:
    """The activation that a config says, Gemma's by another name."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", SILU)


def _take_layer_types(fields: dict[str, Any], family: Family) -> bool:
    """Fill in which layers see a window, and which know no positions; False where the file names
    others."""
    layers, turned = fields["num_hidden_layers"], fields.get("no_rope_layers", ())
    if turned is None:
        every = fields["no_rope_layer_interval"]
        turned = fields["no_rope_layers"] = [int((n + 1) % every != 0) for n in range(layers)]
    if "layer_types" not in fields:
        return True
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    if fields["layer_types"] is None:
        every = fields.get("sliding_window_pattern") or family.full_every
        slides = [every == 0 or (n + 1) % every != 0 for n in range(layers)]
        if "max_window_layers" in fields:
            slides = [n >= fields["max_window_layers"] for n in range(layers)]
        elif turned:
            slides = [not turns for turns in turned]
        windowed = fields["sliding_window"] is not None or len(family.bases) > 1
        fields["layer_types"] = [SLIDING if windowed and slide else FULL for slide in slides]
    kinds = fields["layer_types"]
    return len(kinds) == layers <= len(turned or kinds) and set(kinds) <= {FULL, SLIDING}


def positions_said(
    said: Mapping[str, Any], limit: int, bases: Sequence[float] = (10_000.0,)
) -> dict[str, Any] | None:
    """``rope_parameters`` of what a file says, of older ones too; None: of a kind that is not known
    here.

    Args:
        bases: theta where none is said; of two, the second is that of layers with windows, which
            have positions of their own.
    """
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    if len(bases) > 1:
        parts = rope if FULL in rope or SLIDING in rope else {FULL: rope}
        thetas = {FULL: ("rope_theta", bases[0]), SLIDING: ("rope_local_base_freq", bases[1])}
        found = {
            kind: positions_said(
                {"rope_parameters": parts.get(kind), "rope_theta": said.get(*theta)}, limit
            )
            for kind, theta in thetas.items()
        }
        return None if None in found.values() else found
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_theta", said.get("rope_theta") or bases[0])
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind, known = (
        rope["rope_type"],
        {"rope_type", "type", "truncate", *ROPE} - {"partial_rotary_factor"},
    )
    if (
        not isinstance(kind, str)
        or kind not in ROPE_FIELDS
        or type(rope.get("truncate", True)) is not bool
    ):
        return None
    if not {*ROPE_FIELDS[kind]} <= rope.keys() <= known:
        return None
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", limit)
    return rope


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
        return getattr(config, name, usual) if name in family.usual else usual

    window = (number("sliding_window", 0) or 0) if number("use_sliding_window", True) else 0
    kinds = getattr(config, "layer_types", None) or [SLIDING] * layers
    local, width = len(family.bases) - 1, head_width(config)
    turned = number("no_rope_layers", None) or [1] * layers
    if not family.full_turns:
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


# ---- the files of a folder -----------------------------------------------------------------------


def read_config(name: str, path: Path) -> dict[str, Any]:
    """What a config.json says; one with numbers that no model has is refused before a config is
    made of it.

    Args:
        name: the model's, for messages.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where = f"config.json of model {name}"
    if path.with_name("adapter_config.json").exists():
        raise InputError(f"model folder {name} holds an adapter; valid: {MERGED}")
    said = object_in(path, MOST_CONFIG, f"model {name}")
    first, more = map(said.get, ROPES)
    if first and more and first != more:
        raise refusal(where, "rope_scaling", more, "rope_parameters alone, with all of it")
    if (kind := said.get("model_type")) in FAMILIES:
        usual = {name: value for name, value in FAMILIES[kind].usual.items() if value is not ...}
        check_numbers({"head_dim": None} | usual | said, where)
    else:  # other families have lists and names of their own
        check_numbers({key: value for key, value in said.items() if type(value) is int}, where)
    return said


# ---- the sampling that a model itself names ------------------------------------------------------

#: fields of `config.SamplingParams` that a generation_config.json may have
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")


def named_sampling(config: Any) -> dict[str, Any]:
    """The fields of `config.SamplingParams` that a transformers ``GenerationConfig`` names; of
    None, none."""
    found = {key: value for key in SAMPLING if (value := getattr(config, key, None)) is not None}
    return found | ({"greedy": True} if getattr(config, "do_sample", None) is False else {})
