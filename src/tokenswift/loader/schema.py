"""Numbers of a model's files, held against one schema.

Files come from anybody. Every number that becomes a size, divides another or scales positions is
held against it (:func:`check_numbers`), of config.json and of GGUF metadata, before anything is
made of it: by its transformers' name, and named in messages as its file does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenswift.checks import shown
from tokenswift.loader.bounds import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH
from tokenswift.types import InputError

#: greatest width of a head: the angles of the first positions are computed at once
MOST_HEAD = 1024


def _whole(least: int, most: int) -> Any:
    return Annotated[int, Meta(ge=least, le=most)]


POSITIVE, NOT_NEGATIVE = (
    Annotated[float, Meta(gt=0, le=1e12)],
    Annotated[float, Meta(ge=0, le=1e12)],
)
SHARE = Annotated[float, Meta(gt=0, le=1)]
#: numbers of a row: what the kernels take
WIDTH, LENGTH = _whole(1, MOST_WIDTH), _whole(1, 1 << 40)
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
    "head_dim": _whole(2, MOST_HEAD),
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
    for name in ROPES:
        low = getattr(getattr(found, name), "low_freq_factor", None)
        high = getattr(getattr(found, name), "high_freq_factor", None)
        if low and high and low >= high:
            valid = f"less than high_freq_factor, which is {high}"
            raise refusal(where, f"{name}.low_freq_factor", low, valid)
    heads, kv = found.num_attention_heads or 0, found.num_key_value_heads or 1
    split = found.head_dim is None and heads and found.hidden_size
    share = found.hidden_size / heads if split else found.head_dim or 2
    if heads % kv:
        name, valid = "num_key_value_heads", f"a divisor of {heads}, the number of heads"
    elif share % 2 or share > MOST_HEAD:
        name = "hidden_size" if split else "head_dim"
        valid = f"an even width of each of {heads} heads, up to {MOST_HEAD:,}"
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
