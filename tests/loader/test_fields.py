"""Fields of a config are read by their types."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokenswift import InputError
from tokenswift.loader.fields import Fields

LISTS: dict[str, Callable[[Fields, str], object]] = {
    "integers": Fields.integers,
    "numbers": Fields.numbers,
    "texts": Fields.texts,
}


@pytest.mark.parametrize(
    ("kind", "entries"), [("integers", [1, 0]), ("numbers", [1, 0.5]), ("texts", ["a", "b"])]
)
def test_a_list_of_the_right_entries_is_read(kind: str, entries: list[object]) -> None:
    assert LISTS[kind](Fields({"list": entries}), "list") == entries


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("entries", [[True], [None], [[1]], {"0": 1}, 3])
def test_another_value_is_refused(kind: str, entries: object) -> None:
    with pytest.raises(InputError, match=f"list is .*; valid: a list of {kind}"):
        LISTS[kind](Fields({"list": entries}), "list")


@pytest.mark.parametrize("kind", ["integers", "texts"])
def test_a_list_may_be_left_out(kind: str) -> None:
    assert LISTS[kind](Fields({}), "list") is None
