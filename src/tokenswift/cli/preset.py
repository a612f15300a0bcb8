"""``--preset``: the paper's sampling settings by name."""

from __future__ import annotations

import argparse
import logging

from tokenswift.cli.options import SAMPLING
from tokenswift.sampling.presets import SAMPLERS, sampler

logger = logging.getLogger("tokenswift")


def add_preset_option(parser: argparse.ArgumentParser) -> None:
    """--preset."""
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help=f"a sampling setting of the paper: {', '.join(SAMPLERS)}; other options go "
        "over it; default: none",
    )


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
        f"--{name.replace('_', '-')} {value}" for name, value in taken.items() if value != SAMPLING[name]
    )
    logger.info("preset %s: %s", args.preset, said or "the defaults")
