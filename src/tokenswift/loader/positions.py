"""Rotary positions as a config states them, by the names that transformers has for them now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import FULL, SLIDING
from tokenswift.loader.schema import RopeNumbers

#: parameters that each kind of positions needs besides its theta
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
#: all parameters that positions may have
KNOWN_ROPE_FIELDS = {"rope_type", "type", "truncate", *RopeNumbers.__struct_fields__}
KNOWN_ROPE_FIELDS -= {field for family in FAMILIES.values() for field in family.rope_fields}
#: an older name of positions
OLDER_NAMES = {"su": "longrope"}
#: what configs call the length that a factor of positions extends
TRAINED_LENGTH = "original_max_position_embeddings"
#: how much queries grow with their positions, and which share of a head positions rotate
QUERY_SCALE = "llama_4_scaling_beta"
ROTATED_SHARE = "partial_rotary_factor"


def positions_said(
    stated: Mapping[str, object],
    limit: int,
    bases: Sequence[float] = (10_000.0,),
    more: Sequence[str] = (),
) -> dict[str, object] | None:
    """``rope_parameters`` of what a file states, of older ones too; None: of a kind that is not
    known here.

    Args:
        limit: positions of the model.
        bases: theta where none is stated; of two, the second is that of layers with windows, which
            have positions of their own.
        more: parameters that the family has besides (`Family.rope_fields`).
    """
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    if len(bases) > 1:
        return _positions_by_layer(stated, rope, limit, bases)
    parameters = {name: value for name, value in rope.items() if value is not None}
    parameters.setdefault("rope_theta", stated.get("rope_theta") or bases[0])
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    kind = parameters["rope_type"]
    if not isinstance(kind, str):
        return None
    kind = parameters["rope_type"] = OLDER_NAMES.get(kind, kind)
    if kind not in ROPE_FIELDS:
        return None
    if type(parameters.get("truncate", True)) is not bool:
        return None
    if not {*ROPE_FIELDS[kind]} <= parameters.keys() <= {*KNOWN_ROPE_FIELDS, *more}:
        return None
    if kind == "longrope" and stated.get(TRAINED_LENGTH) is not None:
        parameters[TRAINED_LENGTH] = stated[TRAINED_LENGTH]
    if kind in ("llama3", "yarn", "longrope"):
        parameters.setdefault(TRAINED_LENGTH, limit)
    if ROTATED_SHARE in more:
        parameters.setdefault(ROTATED_SHARE, stated.get(ROTATED_SHARE) or 1.0)
    return parameters


def _positions_by_layer(
    stated: Mapping[str, object], rope: Mapping[str, object], limit: int, bases: Sequence[float]
) -> dict[str, object] | None:
    """``rope_parameters`` of layers that see everything, and of those with windows."""
    parts = rope if FULL in rope or SLIDING in rope else {FULL: rope}
    full = positions_said(
        {
            "rope_parameters": parts.get(FULL),
            "rope_theta": stated.get("rope_theta", bases[0]),
        },
        limit,
    )
    sliding = positions_said(
        {
            "rope_parameters": parts.get(SLIDING),
            "rope_theta": stated.get("rope_local_base_freq", bases[1]),
        },
        limit,
    )
    if full is None or sliding is None or "longrope" in (full["rope_type"], sliding["rope_type"]):
        return None
    return {FULL: full, SLIDING: sliding}


def counts_factor(stated: Mapping[str, object]) -> bool:
    """Whether ``max_position_embeddings`` of a file counts the factor of YaRN already: where the
    file does not say which length the factor extends."""
    rope = stated.get("rope_scaling") or stated.get("rope_parameters")
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return False
    return rope.get(TRAINED_LENGTH) is None and stated.get(TRAINED_LENGTH) is None
