"""`tokenswift quantize`, which is gone: it says what quantizes instead."""

from __future__ import annotations

import argparse
from typing import Any

from tokenswift.types import InputError

INSTEAD = (
    "tokenswift quantize writes no files; valid: llama.cpp's convert_hf_to_gguf.py and llama-quantize, whose "
    "files --model takes, or --weights q8_0, q4_1 or q4_0, which quantizes while a model is loaded"
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "quantize", help="name the programs that write quantized weights", description=INSTEAD + "."
    )
    parser.add_argument("given", nargs="*", metavar="…", help="ignored")


def run(args: argparse.Namespace) -> int:
    """Say it.

    Raises:
        InputError: always.
    """
    raise InputError(INSTEAD)
