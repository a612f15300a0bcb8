"""The command ``tokenswift``: parse, call, and turn every error into one line and an exit code.

Exit codes: 0 done; 1 the run failed; 2 bad input; 129, 130, 143 hung up, interrupted, terminated. A
subcommand is a module of this package, listed in :data:`COMMANDS`, whose ``add_parser(subparsers)`` makes
it by `declare.command` of a function ``run(args) -> int``. Heavy imports (torch, transformers) belong inside
that.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from tokenswift.checks import meant
from tokenswift.cli.declare import Parser
from tokenswift.cli.output import check_apart
from tokenswift.cli.terminal import LogHandler, reason, shown_on, usable_streams
from tokenswift.types import InputError, RunError
from tokenswift.version import __version__

COMMANDS = "generate chat serve resume runs text plan report demo audit bench train".split()
#: commands that another's module has
MODULES: dict[str, str] = {
    **dict.fromkeys(("resume", "text", "report"), "runs"),
    **dict.fromkeys(("plan", "demo", "bench"), "measure"),
}


EXAMPLES = """examples:
  tokenswift generate "Name three rivers."         answer a question
  tokenswift generate --continue "Once upon a time" -m model.gguf
                                                   continue a text, with a model of yours
  tokenswift chat                                  talk with a model

tokenswift COMMAND --help lists the options of a command.

Exit codes: 0 done, 1 failed, 2 bad input, 129, 130, 143 hung up, interrupted, terminated."""
Build = Callable[[Sequence[str]], Parser]


class ShowVersion(argparse.Action):
    """--version: found out only when it is asked for, without importing torch (which takes seconds)."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        from tokenswift.kernels.cpu.library import describe

        parts = [f"{name} {version(name)}" for name in ("torch", "transformers")]
        parts.append(f"Python {platform.python_version()} on {platform.machine()}")
        print(f"tokenswift {__version__} ({', '.join(parts)}; CPU kernels: {describe()})", flush=True)
        parser.exit()


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """The parser of the command line; each subcommand's has its function as the default of ``run``.

    Args:
        argv: a command line; where it begins with a subcommand, the others are left out, which is faster.
    """
    parser = Parser(
        prog="tokenswift",
        usage="tokenswift COMMAND [options]",
        description="Write long text with open language models by speculative decoding: the tokens are those "
        "of plain decoding.",
        epilog=EXAMPLES,
    )
    parser.add_argument("-h", "--help", action="help", help="show this, and exit")
    words = "show the versions of tokenswift and what it runs on, and exit"
    parser.add_argument("--version", action=ShowVersion, nargs=0, help=words)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="tokenswift")
    first = argv[0].replace("-", "_") if argv else None
    names = (first,) if first in COMMANDS else COMMANDS
    for module_name in dict.fromkeys(MODULES.get(name, name) for name in names):
        import_module(f"tokenswift.cli.{module_name}").add_parser(subparsers)
    for command in subparsers.choices.values():
        command.complete()
    return parser


def main(argv: Sequence[str] | None = None, build: Build = build_parser) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code.

    Args:
        build: makes the parser of a command line; another program has its own.
    """
    with usable_streams() as is_open:
        return _main(list(sys.argv[1:] if argv is None else argv), is_open, build)


def _main(argv: list[str], is_open: bool, build: Build) -> int:
    handler, logger = LogHandler(), logging.getLogger("tokenswift")
    level = logger.level
    logger.addHandler(handler)
    args = argparse.Namespace(debug="--debug" in argv)
    try:
        args = parsed(argv, build)
        logger.setLevel(logging.ERROR if getattr(args, "quiet", False) else logging.INFO)
        check_apart(args)
        if not is_open:
            raise RunError("standard output is closed; nothing was begun")
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except (KeyboardInterrupt, Exception) as error:
        if args.debug:
            traceback.print_exception(error)
        if isinstance(error, KeyboardInterrupt):
            code, line = getattr(error, "code", 130), str(error) or "interrupted"
        elif isinstance(error, InputError):
            code, line = 2, str(error)
        else:
            code, line = 1, reason(error)
        line = args.parser.in_words(line) if hasattr(args, "parser") else line
        with suppress(OSError):  # the terminal may be gone
            line = " ".join(f"error: {line}".split())
            print(shown_on(sys.stderr, line), file=sys.stderr, flush=True)
        return code
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def parsed(argv: list[str], build: Build = build_parser) -> argparse.Namespace:
    """The options of a command line, the function ``run`` of its command among them.

    Raises:
        InputError: naming what is wrong with it.
        SystemExit: it asks for help or the version, which was shown.
    """
    for word in argv:  # Python keeps bytes that are no UTF-8 as surrogates
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            text = word.encode("utf-8", "replace").decode()
            raise InputError(f"the argument {text[:80]!r} is not UTF-8; valid: UTF-8 text")
    parser = build(argv)
    first, commands = argv[0].partition("=")[0] if argv else "--help", parser.commands
    if first.startswith("-") and first not in parser._option_string_actions:
        hint = f"options follow a command, as in {parser.prog} {next(iter(commands))} {first}"
        raise InputError(f"unknown option {first}; {hint}")
    if not first.startswith("-") and first not in commands:
        raise InputError(f"unknown command {first}; valid: {', '.join(commands)}{meant(first, commands)}")
    return parser.parse_args(argv or ["--help"])
