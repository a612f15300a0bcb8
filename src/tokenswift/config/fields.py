"""What a field of a class of options says of itself, and the check of all its fields.

::

    window: Annotated[int, AtLeast(16), Option("N", shown=True)] = 128

A *rule* says which numbers the field takes; without one they are integers of at least 1.
:class:`Option` says how the command line has the field (`cli.declare`); what it is for stands in
the docstring of its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True, slots=True)
class Rule:
    """Which numbers a field takes.

    Attributes:
        valid: what is valid, in words that follow "valid: ".
        allows: whether a number is; false for NaN.
    """

    valid: str
    allows: Callable[[float], bool]


class AtLeast(Rule):
    """An integer of at least ``least``; ``valid`` says so in other words."""

    def __init__(self, least: int, valid: str = "") -> None:
        words = valid or f"an integer of at least {least}"
        super().__init__(words, lambda number: number >= least)


class Between(Rule):
    """A number from ``least`` to ``most``; ``valid`` says so unless it is an integer."""

    def __init__(self, least: float, most: float, valid: str = "") -> None:
        words = valid or f"an integer from {least:,} to {most:,}"
        super().__init__(words, lambda number: least <= number <= most)


POSITIVE = AtLeast(1)


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line has a field: ``--like-its-name VALUE`` unless something else is said.

    Attributes:
        metavar: placeholder of its value in the help; None: by its type.
        shown: ``--help`` shows it; ``--help-all`` shows all.
        short: another name, of one letter, such as "-m".
        names: in place of the name that it would have.
        positional: an argument without a name.
        read: makes the value of a text, or raises ValueError; None: by the field's type.
        valid: what ``read`` takes, in words that follow "valid: ".
        repeatable: may be given several times; each adds what ``read`` makes to a list.
        adds_up: may be given several times; each extends the list by the list that ``read`` makes.
        bare: the value where the option is given without one; None: it needs one.
    """

    metavar: str | None = None
    shown: bool = False
    short: str | None = None
    names: tuple[str, ...] = ()
    positional: bool = False
    read: Callable[[str], object] | None = None
    valid: str = ""
    repeatable: bool = False
    adds_up: bool = False
    bare: str | None = None


SHOWN = Option(shown=True)


@dataclass(frozen=True, slots=True)
class FieldType:
    """What the annotation of a field says.

    Attributes:
        kinds: types of its values.
        takes_none: whether it may be None.
        choices: the words that are valid; () where it is no word of a list.
        rule: of its numbers.
        option: how the command line has it.
    """

    kinds: tuple[object, ...]
    takes_none: bool
    choices: tuple[str, ...]
    rule: Rule
    option: Option

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers (and no truth values)."""
        return bool not in self.kinds and (int in self.kinds or float in self.kinds)


@cache
def field_types(options_class: type) -> dict[str, FieldType]:
    """What the annotations of a class of options say, by the names of its fields."""
    hints = get_type_hints(options_class, include_extras=True)
    return {name: _field_type(hint) for name, hint in hints.items()}


def _field_type(hint: object) -> FieldType:
    kinds: list[object] = []
    marks: list[object] = []
    pending = [hint]
    while pending:
        part = pending.pop(0)
        if get_origin(part) is Annotated:
            annotated, *more_marks = get_args(part)
            pending.append(annotated)
            marks.extend(more_marks)
        elif get_origin(part) in (Union, UnionType):
            pending.extend(get_args(part))
        else:
            kinds.append(part)
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    return FieldType(
        kinds=tuple(kinds),
        takes_none=NoneType in kinds,
        choices=get_args(literals[0]) if literals else (),
        rule=next((mark for mark in marks if isinstance(mark, Rule)), POSITIVE),
        option=next((mark for mark in marks if isinstance(mark, Option)), Option()),
    )


def check_fields(options: object) -> None:
    """Check the fields of a dataclass whose types list words, or are truth values or numbers (which
    become Python's own). None passes where the type has it.

    Raises:
        InputError: naming the first that is wrong.
    """
    for name, field_type in field_types(type(options)).items():
        value = getattr(options, name)
        if value is None and field_type.takes_none:
            continue
        if field_type.choices:
            check_choice(name, value, field_type.choices)
        elif bool in field_type.kinds:
            keep_field(options, name, check_flag(name, value))
        elif field_type.is_number:
            keep_field(options, name, _checked_number(options, name, field_type))


def _checked_number(options: object, name: str, field_type: FieldType) -> float:
    """The number of a field, as Python's own."""
    value: object = getattr(options, name)
    number = finite(value) if float in field_type.kinds else integer_of(value)
    too_large = int in field_type.kinds and number is not None and number > LARGEST
    if number is None or too_large or not field_type.rule.allows(number):
        refuse(options, name, f"; valid: {field_type.rule.valid}")
    return value if isinstance(value, int | float) else number


def refuse(options: object, name: str, reason: str) -> NoReturn:
    """Refuse the value of a field.

    Args:
        reason: what follows the value in the line, such as "; valid: …".
    Raises:
        InputError: always.
    """
    raise InputError(f"{name} is {shown(getattr(options, name))}{reason}", name)
