"""The families that the fast suite takes: one with full attention, one with a sliding window."""

from __future__ import annotations

import pytest

from tests.tiny import FAMILIES

FAST = ("llama", "mistral-sliding")


def family(name: str, *arguments: object) -> object:
    """A case of a family and other arguments; of the full matrices alone where it is not in
    :data:`FAST`."""
    marks = () if name in FAST else (pytest.mark.slow,)
    return pytest.param(name, *arguments, marks=marks, id="-".join([name, *map(str, arguments)]))


def rare(*values: object) -> object:
    """A case of the full matrices alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def families() -> list[object]:
    """A case for every family."""
    return [family(name) for name in FAMILIES]
