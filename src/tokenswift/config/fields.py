"""Checks of options: fields of dataclasses that list words, or are truth values or numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from tokenswift.checks import (
    LARGEST,
    check_choice,
    check_flag,
    finite,
    integer_of,
    keep_field,
    shown,
)
from tokenswift.types import InputError

MAX_NODES = 4096  # of a tree, its root included
MAX_GAMMA = 32  # tokens of a drafted chain, each of which takes a pass or more


CORES = os.cpu_count() or 1
THREADS = max(16, 4 * CORES)  # at most
Rule = tuple[str, str, Callable[[float], bool]]
#: fields of classes of options that are numbers; what is valid, in words; whether a number is
RULES: tuple[Rule, ...] = (
    (
        "temperature",
        "0 (greedy decoding), or from 1e-30 to 1e30",
        lambda t: t == 0 or 1e-30 <= t <= 1e30,
    ),
    ("top_k", "an integer of at least 1, or 0 for all tokens", lambda k: k >= 0),
    ("top_p", "in (0, 1]", lambda p: 0 < p <= 1),
    ("min_p eta_cutoff", "in [0, 1)", lambda p: 0 <= p < 1),
    ("repetition_penalty", "at least 1 (1 is off), at most 1e30", lambda r: 1 <= r <= 1e30),
    ("presence_penalty frequency_penalty", "from -2 to 2 (0 is off)", lambda p: -2 <= p <= 2),
    ("dry_multiplier", "from 0 (off) to 1e6", lambda m: 0 <= m <= 1e6),
    ("dry_base", "from 1 to 1e6", lambda b: 1 <= b <= 1e6),
    ("dry_allowed_length", "an integer from 1 to 4,096", lambda n: 1 <= n <= 4096),
    ("dry_range", "an integer of at least 1, or -1 for all", lambda n: n == -1 or n > 0),
    ("seed", "an integer from 0 to 2^63 - 1", lambda n: n >= 0),
    ("threads", f"1 to {THREADS} (this machine has {CORES} cores)", lambda n: 1 <= n <= THREADS),
    ("gamma inner_gamma", f"an integer from 1 to {MAX_GAMMA}", lambda n: 1 <= n <= MAX_GAMMA),
    (
        "ngrams",
        f"an integer from 0 to {MAX_NODES // 4:,}",
        lambda n: 0 <= n <= MAX_NODES // 4,
    ),  # of 4 tokens
    ("min_tokens sinks refresh queue", "an integer of at least 0", lambda n: n >= 0),
    ("steps warmup loss_vocabulary", "an integer of at least 0", lambda n: n >= 0),
    ("tokens", "an integer of at least 256", lambda n: n >= 256),
    ("sequence_length", "an integer of at least 32", lambda n: n >= 32),
    ("window", "an integer of at least 16", lambda n: n >= 16),
    ("epochs weight_decay", "from 0 to 1e6", lambda x: 0 <= x <= 1e6),
    ("held_out", "from 0 to 0.5", lambda x: 0 <= x <= 0.5),
    ("lr beta2", "between 0 and 1", lambda x: 0 < x < 1),
    ("port", "an integer from 0 (any that is free) to 65535", lambda n: 0 <= n <= 65_535),
    (
        "logprobs",
        "an integer from 0 to 20, or None",
        lambda n: 0 <= n <= 20,
    ),  # as OpenAI's interface
)
USUAL = ("an integer of at least 1", lambda n: n > 0)  # of the other numbers
RULE_OF = {name: (valid, fits) for names, valid, fits in RULES for name in names.split()}
hints_of = cache(get_type_hints)


def check_fields(options: object) -> None:
    """Check the fields of a dataclass whose types list words, or are truth values or numbers (which
    become Python's own). None passes where the type has it.

    Raises:
        InputError: naming the first that is wrong.
    """
    for name, hint in hints_of(type(options)).items():
        value = getattr(options, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
        if value is None and NoneType in kinds:
            continue
        if choices is not None:
            check_choice(name, value, choices)
        elif bool in kinds:
            keep_field(options, name, check_flag(name, value))
        elif int in kinds or float in kinds:
            valid, fits = RULE_OF.get(name, USUAL)
            number = finite(value) if float in kinds else integer_of(value)
            wrong = number is None or not fits(number) or (int in kinds and number > LARGEST)
            refuse(wrong, options, name, f"; valid: {valid}")
            keep_field(options, name, value if isinstance(value, int | float) else number)


def refuse(when: bool, options: object, name: str, rest: str) -> None:
    """Raise :class:`InputError` for a field, where ``when`` holds: its value and the rest of the
    line."""
    if when:
        raise InputError(f"{name} is {shown(getattr(options, name))}{rest}", name)
