"""``tokenswift completion``: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import sys
from typing import Any

SHELLS = ("bash", "zsh", "fish")
#: placeholders of values that are files or folders
FILES, FOLDERS = ("FILE", "F", "PATH", "SRC", "DST"), ("DIR", "FOLDER")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="Print a script that completes commands, options and file names in a shell. For bash: "
        "tokenswift completion bash > ~/.local/share/bash-completion/completions/tokenswift; for zsh: the "
        "same into a file _tokenswift in a folder of $fpath; for fish: into "
        "~/.config/fish/completions/tokenswift.fish. It works in the next shell.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from tokenswift.cli.main import build_parser, subparsers_of

    parser, _ = build_parser()
    for subparser in subparsers_of(parser).values():
        for action in subparser._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    sys.stdout.flush()
    return 0
