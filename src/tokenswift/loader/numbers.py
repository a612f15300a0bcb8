"""The numbers that a model's files may say, in one schema for config.json and GGUF metadata.

Files come from anybody. Every number that becomes a size, divides another or scales positions is held against
this schema before anything is made of it: by its transformers' name, and named in messages as its file does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenswift.checks import shown
from tokenswift.types import InputError

#: greatest number of tokens of a vocabulary; the largest of known models are 262,144
MOST_TOKENS = 1 << 20
MOST_LAYERS = 1024
#: greatest width of a head: the angles of the first positions are computed at once
MOST_WIDTH = 1024


def _whole(least: int, most: int) -> Any:
    """An integer of a range."""
    return Annotated[int, Meta(ge=least, le=most, description=f"an integer from {least} to {most:,}")]


def _number(text: str, **bounds: float) -> Any:
    """A finite number of a range."""
    return Annotated[float, Meta(**{"le": 1e12, **bounds}, description=text)]  # type: ignore[arg-type]


POSITIVE = _number("a number above 0, at most 10^12", gt=0)
NOT_NEGATIVE = _number("a number from 0 to 10^12", ge=0)
SWITCH = Annotated[bool, Meta(description="true or false")]
#: numbers of a row: what the kernels take
WIDTH, LENGTH = _whole(1, 1 << 18), _whole(1, 1 << 40)
#: positions: ``rope_parameters`` of a config, or ``rope_scaling`` as older ones have it; all may be null
ROPE: dict[str, Any] = {
    "rope_theta": POSITIVE,
    "factor": POSITIVE,
    "attention_factor": POSITIVE,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": LENGTH,
    "partial_rotary_factor": _number("a number above 0, at most 1", gt=0, le=1),
}
#: fields of a config that are never null
SIZES: dict[str, Any] = {
    "vocab_size": _whole(1, MOST_TOKENS),
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": _whole(1, MOST_LAYERS),
    "num_attention_heads": _whole(1, 1 << 14),
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": _number("a number above 0, at most 1", gt=0, le=1),
}
#: and those that may be
OTHERS: dict[str, Any] = {
    "num_key_value_heads": _whole(1, 1 << 14),
    "head_dim": _whole(2, MOST_WIDTH),
    "sliding_window": _whole(0, 1 << 40),
    "max_window_layers": _whole(0, 1 << 20),
    "num_labels": _whole(0, 1 << 16),
    "tie_word_embeddings": SWITCH,
    "attention_bias": SWITCH,
    "mlp_bias": SWITCH,
    "rope_theta": POSITIVE,
}
ROPES = ("rope_parameters", "rope_scaling")
#: what a value must be, in words, by its name
VALID: dict[str, str] = {name: kind.__metadata__[0].description for name, kind in {**SIZES, **OTHERS}.items()}
VALID |= {f"{rope}.{name}": kind.__metadata__[0].description for rope in ROPES for name, kind in ROPE.items()}


def _optional(fields: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, kind | None | UnsetType, UNSET) for name, kind in fields.items()]


_Rope = msgspec.defstruct("Rope", _optional(ROPE))
#: what is not given is not looked at
_Numbers: Any = msgspec.defstruct(
    "Numbers",
    [(name, kind | UnsetType, UNSET) for name, kind in SIZES.items()]
    + _optional({**OTHERS, **dict.fromkeys(ROPES, _Rope)}),
)


def check_numbers(said: Mapping[str, Any], where: str, called: Mapping[str, str] | None = None) -> None:
    """Refuse numbers that no model has.

    Args:
        said: fields of a config; those that the schema does not name are not looked at.
        where: the file, for messages.
        called: what the file calls a field, where that is not transformers' name.
    Raises:
        InputError: naming the first value that is wrong, and what is valid.
    """
    try:
        found = msgspec.convert(dict(said), _Numbers)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("`$.")[2].rstrip("`")
        value: Any = said
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        raise refusal(where, (called or {}).get(name, name), value, VALID.get(name, "an object")) from None
    names = dict(called or {})

    def refuse(name: str, valid: str) -> None:
        raise refusal(where, names.get(name, name), getattr(found, name), valid)

    heads, hidden = found.num_attention_heads, found.hidden_size
    if isinstance(found.num_key_value_heads, int) and isinstance(heads, int):
        if heads % found.num_key_value_heads:
            refuse("num_key_value_heads", f"a divisor of {heads}, the number of heads")
    if isinstance(found.head_dim, int):
        if found.head_dim % 2:
            refuse("head_dim", f"an even number up to {MOST_WIDTH:,}")
    elif found.head_dim is None and isinstance(heads, int) and isinstance(hidden, int):
        if hidden % heads or hidden // heads % 2 or hidden // heads > MOST_WIDTH:
            refuse("hidden_size", f"an even multiple of {heads} heads, of up to {MOST_WIDTH:,} each")
    for rope in (found.rope_parameters, found.rope_scaling):
        if getattr(rope, "factor", UNSET) is None:
            raise refusal(where, "rope_parameters.factor", None, VALID["rope_parameters.factor"])
        low, high = (getattr(rope, f"{name}_freq_factor", None) for name in ("low", "high"))
        if isinstance(low, float) and isinstance(high, float) and not low < high:
            raise refusal(
                where, "rope_parameters.low_freq_factor", low, f"less than high_freq_factor, which is {high}"
            )


def refusal(where: str, name: str, value: object, valid: str) -> InputError:
    """That a file says what no model's file says, in one line."""
    if isinstance(value, float) and not math.isfinite(value):
        value = {math.inf: "infinite", -math.inf: "-infinite"}.get(value, "not a number")
        return InputError(f"{where}: {name} is {value}; valid: {valid}")
    return InputError(f"{where}: {name} is {shown(value)}; valid: {valid}")
