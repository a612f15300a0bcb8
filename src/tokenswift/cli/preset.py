"""``--preset``: the paper's sampling settings by name."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from typing import Any

from tokenswift.cli.declare import RARE, add_options, option
from tokenswift.config import CONTINUED
from tokenswift.sampling.presets import SAMPLERS, sampler

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Preset:
    """Sampling by name.

    Attributes:
        preset: its name
    """

    preset: str | None = option(None, "NAME", level=RARE)


def add_preset_option(to: Any) -> None:
    """--preset."""
    names = f"the paper's sampling settings ({', '.join(SAMPLERS)}); other options override it; default: none"
    add_options(to, Preset, texts={"preset": names})


def apply_preset(args: argparse.Namespace) -> None:
    """Write the named setting's fields where the command line says nothing else.

    Raises:
        InputError: an unknown name.
    """
    if args.preset is None:
        return
    taken = {name: value for name, value in sampler(args.preset).items() if getattr(args, name) is None}
    for name, value in taken.items():
        setattr(args, name, value)
    said = ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in taken.items()
        if value != getattr(CONTINUED, name)
    )
    logger.info("preset %s: %s", args.preset, said or "the defaults")
