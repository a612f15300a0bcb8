"""The command ``tokenswift``: parse, call, and turn every error into one line and an exit code.

Exit codes: 0 done; 1 the run failed; 2 bad input; 129, 130, 143 hung up, interrupted, terminated. A
subcommand is in a module of this package, by :data:`MODULES`, whose ``add_parser(subparsers)``
makes it by `declare.command` of a function ``run(args) -> int``. Heavy imports (torch,
transformers) belong inside that.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from tokenswift.checks import meant, shown
from tokenswift.cli.declare import Parser
from tokenswift.cli.places import check_apart
from tokenswift.cli.signals import reason
from tokenswift.cli.terminal import LogHandler, flush, usable_streams, visible
from tokenswift.types import InputError, RunError
from tokenswift.version import __version__

COMMANDS = "generate chat serve models resume runs plan demo bench audit train".split()
#: commands that another's module has
MODULES: dict[str, str] = dict.fromkeys(("resume", "runs"), "generate")
MODULES |= dict.fromkeys(("plan", "demo", "bench", "audit"), "measure")
EXAMPLES = """examples:
  tokenswift generate "Name three rivers."         answer a question
  tokenswift generate --continue "Once upon a time" -m model.gguf
                                                   continue a text, with a model of yours
  tokenswift chat                                  talk with a model

tokenswift COMMAND --help lists the options of a command.

Exit codes: 0 done, 1 failed, 2 bad input, 129, 130, 143 hung up, interrupted, terminated."""


class ShowVersion(argparse.Action):
    """--version: versions are looked up only then, and without importing torch (which takes
    seconds)."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        from importlib.metadata import version

        from tokenswift.kernels.cpu.library import describe

        parts = [f"{name} {version(name)}" for name in ("torch", "transformers")]
        parts.append(f"Python {platform.python_version()} on {platform.machine()}")
        print(
            f"tokenswift {__version__} ({', '.join(parts)}; CPU kernels: {describe()})", flush=True
        )
        parser.exit()


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """The parser of the command line; each subcommand's has its function as the default of ``run``.

    Args:
        argv: a command line; where it begins with a subcommand, the others are left out, which is
            faster.
    """
    parser = Parser(
        prog="tokenswift",
        usage="tokenswift COMMAND [options]",
        description="Write long text with open language models by speculative decoding: the "
        "tokens are those of plain decoding.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="help", help="show this, and exit")
    words = "show the versions of tokenswift and what it runs on, and exit"
    parser.add_argument("--version", action=ShowVersion, nargs=0, help=words)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True
    )
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    for module in dict.fromkeys(MODULES.get(name, name) for name in names):
        import_module(f"tokenswift.cli.{module}").add_parser(subparsers)
    return parser


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, the function ``run`` of its command among them.

    Raises:
        InputError: naming what is wrong with it.
        SystemExit: it asks for help or the version, which was shown.
    """
    for word in argv:
        check_utf8(word)
    parser = build_parser(argv)
    first = argv[0] if argv else "--help"
    if first not in COMMANDS and first not in parser._option_string_actions:
        is_option = first.startswith("-")
        kind = "argument before a command" if is_option else "command"
        line = f"unknown {kind}: {first}; valid: {', '.join(COMMANDS)}"
        names = () if is_option else COMMANDS
        raise InputError(line + meant(first, (*names, *parser._option_string_actions)))
    return parser.parse_args(list(argv) or ["--help"])


def check_utf8(word: str) -> None:
    """Refuse an argument that is not UTF-8, whose bytes Python keeps as lone surrogates.

    Raises:
        InputError: showing what can be shown of it.
    """
    try:
        word.encode()
    except UnicodeEncodeError as error:
        text = word.encode("utf-8", "replace").decode()
        raise InputError(f"the argument {shown(text)} is not UTF-8; valid: UTF-8 text") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    logger = logging.getLogger("tokenswift")
    level = logger.level
    handler = LogHandler()
    args = argparse.Namespace()
    is_open = usable_streams()
    logger.addHandler(handler)
    try:
        args = parsed(argv)
        logger.setLevel(logging.ERROR if getattr(args, "quiet", False) else logging.INFO)
        if not is_open:
            raise RunError("standard output is closed; nothing was begun")
        check_apart(args)
        return args.run(args)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except (KeyboardInterrupt, Exception) as error:
        if "--debug" in argv:
            traceback.print_exception(error)
        return report_error(error, getattr(args, "parser", None))
    finally:
        flush()
        logger.removeHandler(handler)
        logger.setLevel(level)


def report_error(error: BaseException, parser: Parser | None) -> int:
    """Say what ended a command in one line; its exit code."""
    code: int = 1
    if isinstance(error, KeyboardInterrupt):
        code = getattr(error, "code", 130)
        line = str(error) or "interrupted"
    elif isinstance(error, InputError):
        code = 2
        line = str(error)
    else:
        line = reason(error)
    line = " ".join(f"error: {parser.in_words(line) if parser else line}".split())
    with suppress(OSError):  # the terminal may be gone
        print(visible(line), file=sys.stderr, flush=True)
    return code
