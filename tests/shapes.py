"""Shapes are checked while tests run: every tensor that crosses a function of the package with an
annotated shape is compared with it (jaxtyping and beartype). ``TOKENSWIFT_SHAPES=0`` leaves it out,
to time tests, and for processes of theirs that are not there to check shapes.

Only shapes are looked at: protocols, and the stand-ins that tests use for them, are pyright's.
Functions without an annotated shape stay as they are. Of the others each test checks the first
calls and a few of those that follow: checking all of them takes as long as the tests themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isclass
from typing import Any

import jaxtyping
from beartype import beartype
from torch import Tensor

#: calls of a function that a test checks: so many at first, and then one of so many
FIRST = 8
EVERY = 32
_with_letters = jaxtyping.jaxtyped  # gives the letters of shapes one meaning within a call


def install() -> None:
    """Watch the package, which nobody may have imported yet."""
    # what the hook puts above every function and class
    jaxtyping.jaxtyped = lambda **_: _watched
    jaxtyping.install_import_hook("tokenswift", None)


class Test:
    """The running test; its number tells the calls of one test from those of another."""

    number = 0


def begin_test() -> None:
    """Another test begins: the next calls of each function are checked."""
    Test.number += 1


def _watched(target: Any) -> Any:
    if not isclass(target):
        return _checked(target)
    if "__init__" in vars(target):  # a dataclass's
        target.__init__ = _checked(target.__init__)
    return target


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    hints = getattr(function, "__annotations__", {})
    shapes = {name: hint for name, hint in hints.items() if "[Tensor, " in str(hint)}
    if not shapes or hasattr(function, "__wrapped__"):
        return function
    # a module may import what its annotations name for pyright alone
    names = {"Tensor": Tensor, **vars(jaxtyping), **function.__globals__}
    function.__annotations__ = {name: eval(hint, names) for name, hint in shapes.items()}
    return _often(function, _with_letters(beartype(function), typechecker=None))


def _often(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """The checked function for the first calls of a test and a few later ones, else the function
    itself."""
    test = 0
    calls = 0

    @wraps(function)
    def often_checked(*args: object, **named: object) -> object:
        nonlocal test, calls
        if test != Test.number:
            test = Test.number
            calls = 0
        calls += 1
        if calls <= FIRST or calls % EVERY == 0:
            return checked(*args, **named)
        return function(*args, **named)

    return often_checked
