"""Settings that a chat changes on its way: ``/set temperature .3``. Light: no torch in here."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from tokenswift.checks import meant
from tokenswift.cli.call import Text
from tokenswift.cli.declare import dashed, shown, value_reader
from tokenswift.cli.options import SAMPLING
from tokenswift.config.fields import field_types
from tokenswift.config.sampling import SamplingParams, sampling_over, settings_of
from tokenswift.types import InputError

LENGTH = "max_new_tokens"
SWITCHES = {"on": True, "off": False, "true": True, "false": False}
FORM = re.compile(r"-*(?P<name>[\w-]+)(?:\s*=\s*|\s+)(?P<value>.+)", re.DOTALL)


class Settings:
    """How a chat's answers are written.

    Attributes:
        sampling: how tokens are chosen.
        max_new_tokens: of an answer; None: as many as it takes.
    """

    def __init__(self, sampling: SamplingParams, max_new_tokens: int | None) -> None:
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self._first_sampling = sampling
        self._first_length = max_new_tokens

    def rows(self) -> list[tuple[str, str]]:
        """The settings that are not off, with their values."""
        length = "no limit" if self.max_new_tokens is None else str(self.max_new_tokens)
        values = settings_of(self.sampling)
        return [*((name, typed(value)) for name, value in values.items()), (LENGTH, length)]

    def change(self, text: str) -> str:
        """Do what follows ``/set``: a name and a value, which may be ``default``: as the chat
        began.

        Returns:
            the name of the setting and its value as a text.
        Raises:
            InputError: no such setting, or a value that it does not take; nothing has changed.
        """
        match = FORM.fullmatch(text.strip())
        if match is None:
            valid = "a name and a value, such as /set temperature .3; /set alone lists them"
            raise InputError(f"/set {text} has no value; valid: {valid}")
        name = match["name"].replace("-", "_").lower()
        value = match["value"].strip()
        if name not in (*SAMPLING, LENGTH):
            names = [*SAMPLING, LENGTH]
            line = f"/set {match['name']} is no setting; valid: {', '.join(map(dashed, names))}"
            raise InputError(line + meant(name, names))
        try:
            if name == LENGTH:
                self._set_length(value)
            else:
                self._set_sampling(name, value)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"/set {dashed(name)} {error}") from None
        except InputError as error:
            raise InputError(f"/set {dashed(name)}{str(error).removeprefix(name)}") from None
        if name == LENGTH and self.max_new_tokens is None:
            return f"{name} has no limit"
        return f"{name} is {dict(self.rows()).get(name, 'off')}"

    def next_seed(self) -> int:
        """Go on with another seed; returns it."""
        seed = (self.sampling.seed + 1) % 2**63
        self.sampling = replace(self.sampling, seed=seed)
        return seed

    def _set_length(self, text: str) -> None:
        if text == "default":
            self.max_new_tokens = self._first_length
            return
        length = value_reader(field_types(Text)[LENGTH])(text)
        self.max_new_tokens = length if isinstance(length, int) else None

    def _set_sampling(self, name: str, text: str) -> None:
        field_type = field_types(SamplingParams)[name]
        if text == "default":
            value: object = getattr(self._first_sampling, name)
        elif bool in field_type.kinds:
            if text.lower() not in SWITCHES:
                raise argparse.ArgumentTypeError(f"is {text!r}; valid: on, off")
            value = SWITCHES[text.lower()]
        else:
            value = value_reader(field_type)(text)
        self.sampling = sampling_over(self.sampling, {name: value})


def typed(value: object) -> str:
    """A value as /set takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return shown(value)
