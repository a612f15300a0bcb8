"""Bounds of what a config.json of any family may say.

They are held before transformers makes anything of it. A family's own code makes a layer, an expert
or a label for each that a config asks for, and takes as long as there are many: a file of a few
bytes could keep a process busy for ever. What a name says of a number decides how large it may be,
in configs within configs, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tokenswift.checks import shown
from tokenswift.types import InputError

MOST_LAYERS = 1024
#: greatest number of tokens of a vocabulary; the largest of known models are 262,144
MOST_TOKENS = 1 << 20
#: greatest width of rows: what the kernels take
MOST_WIDTH = 1 << 18
#: any number: more than the positions of any model
MOST = 1 << 40
#: letters of a text, or entries of a list
MOST_ENTRIES = 4096
#: numbers in lists of lists: how often layers are repeated, or token ids
MOST_LISTED = 1 << 20
#: parts of any size, as no model is made by them: lists of modules, and names of classes
UNBOUNDED = ("quantization_config", "id2label", "label2id")


class _Bound(NamedTuple):
    """The greatest number of fields whose names are of a kind."""

    names: re.Pattern[str]
    most: int


#: the first that fits a name counts
_BOUNDS = (
    _Bound(re.compile(r"(.*_)?vocab_size(_per_layer_input)?"), MOST_TOKENS),
    _Bound(re.compile(r".*(hidden|intermediate|embedding|ffn)_size.*"), MOST_WIDTH),
    _Bound(re.compile(r"d_model|d_ff|dff|dim_ff|n_embd|n_inner|.*(ffn|embed|emb)_dim"), MOST_WIDTH),
    _Bound(re.compile(r"max_window_layers"), MOST_TOKENS),
    _Bound(re.compile(r"(.*_)?(layers?|blocks|depth)(_.*)?"), MOST_LAYERS),
    _Bound(re.compile(r"(.*_)?(experts?|n_head|heads)(_.*)?"), 1 << 14),
    _Bound(re.compile(r"num_labels"), 1 << 16),
    _Bound(re.compile(r"num_image_with_embedding"), 1 << 12),
)
#: lists and texts with a place for each layer
_BY_LAYER = re.compile(r".*(layer|pattern|types).*")


def check_bounds(fields: Mapping[str, object], where: str) -> None:
    """Refuse numbers, texts and lists that are larger than any model's.

    Args:
        fields: of a config.
        where: the file, for messages.
    Raises:
        InputError: naming the first value that is too large, and what is valid.
    """
    for name, value in fields.items():
        if name in UNBOUNDED:
            continue
        if isinstance(value, Mapping):
            check_bounds(value, where)
            continue
        valid = _number_fault(name, value) or _list_fault(name, value)
        if valid is not None:
            raise InputError(f"{where}: {name} is {shown(value)}; valid: {valid}")


def _number_fault(name: str, value: object) -> str | None:
    """What would be valid in place of a number that is too large; None: it is not, or is none."""
    bound = next((bound for bound in _BOUNDS if bound.names.fullmatch(name)), None)
    if bound is not None and isinstance(value, int | float) and value > bound.most:
        return f"up to {bound.most:,}"
    if isinstance(value, int) and value > MOST:
        return f"up to {MOST:,}"
    return None


def _list_fault(name: str, value: object) -> str | None:
    """What would be valid in place of a text or list that is too large; None: it is not, or is
    none."""
    most = MOST_LAYERS if _BY_LAYER.fullmatch(name) else MOST_ENTRIES
    if isinstance(value, str | list) and len(value) > most:
        return f"up to {most:,} {'letters' if isinstance(value, str) else 'entries'}"
    if isinstance(value, list) and _greatest(value) > MOST_LISTED:
        return f"numbers up to {MOST_LISTED:,} in a list"
    return None


def _greatest(value: object) -> int:
    """The greatest integer in lists of lists."""
    if isinstance(value, list):
        return max((_greatest(entry) for entry in value), default=0)
    return value if isinstance(value, int) else 0
