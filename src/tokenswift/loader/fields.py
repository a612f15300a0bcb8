"""Fields of a config, read by the type that they have to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tokenswift.loader.schema import refusal

Entry = TypeVar("Entry")


class Fields:
    """Fields of a config, whose values are checked as they are read.

    Args:
        values: fields by name.
        where: whose they are, for messages.
    """

    def __init__(self, values: Mapping[str, object], where: str = "the model's config") -> None:
        self._values = values
        self._where = where

    def integer(self, name: str) -> int:
        """An integer.

        Raises:
            InputError: the field is anything else, or is not stated.
        """
        value = self._values.get(name)
        if type(value) is not int:
            raise refusal(self._where, name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number.

        Args:
            default: stands for a field that is not stated.
        Raises:
            InputError: the field is anything else, or is not stated and has no default.
        """
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refusal(self._where, name, value, "a number")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers; None: it is not stated.

        Raises:
            InputError: the field is anything else.
        """
        if self._values.get(name) is None:
            return None
        return self._entries(name, (int,), "a list of integers")

    def numbers(self, name: str) -> list[float]:
        """A list of numbers.

        Raises:
            InputError: the field is anything else, or is not stated.
        """
        return self._entries(name, (int, float), "a list of numbers")

    def texts(self, name: str) -> list[str] | None:
        """A list of texts; None: it is not stated.

        Raises:
            InputError: the field is anything else.
        """
        if self._values.get(name) is None:
            return None
        return self._entries(name, (str,), "a list of texts")

    def _entries(self, name: str, types: tuple[type[Entry], ...], valid: str) -> list[Entry]:
        """A list whose entries are of these types, and of none derived from them: a truth value is
        no integer.

        Raises:
            InputError: the field is anything else, or is not stated.
        """
        value = self._values.get(name)
        if not isinstance(value, list) or not all(type(entry) in types for entry in value):
            raise refusal(self._where, name, value, valid)
        return value
