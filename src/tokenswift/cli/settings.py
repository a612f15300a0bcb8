"""What ``/set`` of a chat shows and changes: how answers are sampled, and how long they become."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any

from tokenswift.checks import LARGEST, check_integer, meant
from tokenswift.cli.declare import KINDS, texts_of
from tokenswift.config import SamplingParams, sampling_over
from tokenswift.types import InputError

_NAMES = [one for one in fields(SamplingParams) if one.name != "grammar"]
KIND_OF = {one.name: str(one.type) for one in _NAMES} | {"max_new_tokens": "int"}
TEXT_OF = texts_of(SamplingParams) | {"max_new_tokens": "tokens of an answer at most, at least 1, or none"}
FLAG = {"on": True, "off": False}


@dataclass(frozen=True)
class Settings:
    """Of the answers that follow.

    Attributes:
        max_new_tokens: of an answer at most; None: until the model ends it.
    """

    sampling: SamplingParams
    max_new_tokens: int | None

    def values(self) -> dict[str, Any]:
        """Field → value."""
        own = {one.name: getattr(self.sampling, one.name) for one in _NAMES}
        if self.sampling.greedy:
            own["temperature"] = 0.0
        return {**own, "max_new_tokens": self.max_new_tokens}

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and what it is, of each."""
        return [(dashed(name), said(value), TEXT_OF[name]) for name, value in self.values().items()]

    def changed(self, words: str) -> tuple[str, Settings]:
        """The field that ``words`` names, and these settings with its new value.

        Args:
            words: a name and a value, with a space or ``=`` between them.
        Raises:
            InputError: no such name, or no such value, in the words of the option of that name.
        """
        given, _, text = words.strip().replace("=", " ", 1).partition(" ")
        name, text = given.removeprefix("--").replace("-", "_"), text.strip()
        if name not in KIND_OF:
            names = [dashed(name) for name in KIND_OF]
            raise InputError(f"/set {given} is not a setting; valid: {', '.join(names)}{meant(given, names)}")
        try:
            value = _read(name, text)
            if name == "max_new_tokens":
                made = replace(self, max_new_tokens=value if value is None else check_integer(name, value, 1))
            else:
                made = replace(self, sampling=sampling_over(self.sampling, {name: value}))
        except (InputError, argparse.ArgumentTypeError) as error:
            raise InputError(f"/set {dashed(name)} {str(error).removeprefix(name).strip()}") from None
        return name, made

    def next_seed(self) -> Settings:
        """These settings with the seed behind theirs, for another answer."""
        seed = self.sampling.seed
        return replace(self, sampling=replace(self.sampling, seed=seed + 1 if seed < LARGEST else 0))


def dashed(name: str) -> str:
    """A field as it is typed: ``top-p``."""
    return name.replace("_", "-")


def said(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return next(word for word, flag in FLAG.items() if flag is value)
    if isinstance(value, tuple):
        pairs = [f"{one[0]}={said(one[1])}" if isinstance(one, tuple) else repr(one) for one in value]
        return ",".join(pairs) or "none"
    return str(value).removesuffix(".0")


def _read(name: str, text: str) -> Any:
    """The value that a text is."""
    if KIND_OF[name] == "bool":
        if text not in ("", *FLAG):
            raise InputError(f"is {text!r}; valid: {', '.join(FLAG)}")
        return FLAG[text or "on"]
    if not text:
        raise InputError(f"has no value; valid: /set {dashed(name)} {KINDS[KIND_OF[name]][1]}")
    if name == "max_new_tokens" and text == "none":
        return None
    return KINDS[KIND_OF[name]][0](text)
