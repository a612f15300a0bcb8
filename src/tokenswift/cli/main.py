"""The command ``tokenswift``: parse, call, and turn every error into one line and an exit code.

Exit codes: 0 done; 1 the run failed; 2 bad input; 129, 130, 143 hung up, interrupted, terminated. A
subcommand is a module of this package, listed in :data:`COMMANDS`, with two functions:
``add_parser(subparsers)`` and ``run(args) -> int | None``. Heavy imports (torch, transformers) belong
inside ``run``.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from tokenswift.checks import alike, meant
from tokenswift.cli.declare import complete, keys_of
from tokenswift.cli.errors import (
    at_most,
    check_utf8,
    is_out_of_memory,
    long_name,
    option_names,
    say,
    with_option_name,
    with_suggestion,
)
from tokenswift.cli.terminal import STANDARD_OUTPUT, LogHandler, usable_streams
from tokenswift.types import InputError, RunError

COMMANDS = (
    "generate",
    "chat",
    "serve",
    "resume",
    "runs",
    "models",
    "text",
    "plan",
    "report",
    "demo",
    "audit",
    "bench",
    "train_heads",
    "train_draft",
    "train_eagle",
    "eval_heads",
)
#: commands that another's module has
MODULES = dict.fromkeys(("resume", "text", "report"), "runs")


EXAMPLES = """examples:
  tokenswift generate "Name three rivers."         answer a question
  tokenswift generate --continue "Once upon a time" -m model.gguf
                                                   continue a text, with a model of yours
  tokenswift chat                                  talk with a model

tokenswift COMMAND --help lists the options of a command.

Exit codes: 0 done, 1 failed, 2 bad input, 129, 130, 143 hung up, interrupted, terminated."""
#: commands that write nothing to standard output
SILENT = ("train-heads", "train-draft", "train-eagle", "report")


class Format(argparse.HelpFormatter):
    """Options with the placeholder of their value once: ``-s, --seed N``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 30, **kwargs})

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # whose commands stand two columns to the right
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if not names or action.nargs == 0:
            return names or super()._format_action_invocation(action)
        return f"{names} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ordinary :class:`InputError`\\ s (no usage dump, no exit)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"allow_abbrev": False, "formatter_class": Format, **kwargs}
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        """The help, its usage without the names of all options."""
        words = [self.prog]
        for action in self._actions:
            if action.option_strings:
                if action.required:
                    words += [long_name(action.option_strings), str(action.metavar)]
            elif isinstance(action, argparse._SubParsersAction):
                words.append(f"{action.metavar} ...")
            else:
                words.append(f"[{action.metavar}]" if action.nargs in ("?", "*") else str(action.metavar))
        self.usage = " ".join([words[0], "[options]", *words[1:]])
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Print the help text; argparse's own would pass over what cannot be written."""
        print(self.format_help(), end="", file=file or sys.stdout, flush=True)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; options that are not known are blamed, not what stands behind them."""
        first = next(iter(args or ()), "").partition("=")[0]
        if first.startswith("-") and subparsers_of(self) and first not in self._option_string_actions:
            hint = f"; options follow a command, as in {self.prog} {next(iter(subparsers_of(self)))} {first}"
            own = alike(first, self._option_string_actions)
            raise InputError(f"unknown option {first}{'' if own else hint}")
        made, rest = self.parse_known_args(args, namespace)
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is not None:
            raise InputError(f"unknown option {unknown}")
        if rest:
            raise InputError(f"unexpected argument {rest[0]!r}; valid: quotes around a text of several words")
        return made

    def error(self, message: str) -> NoReturn:
        chosen = re.match(r"argument ([^:]+): invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if chosen is not None:
            name, given, valid = chosen[1], chosen[2], re.sub("['\"]", "", chosen[3])
            what = (
                f"unknown command {given}"
                if name == "COMMAND"
                else f"{long_name(name.split('/'))} is {given!r}"
            )
            raise InputError(f"{what}; valid: {valid}{meant(given, valid.split(', '))}")
        raise InputError(
            re.sub(
                r"^argument ([^:]+):( is )?", lambda m: long_name(m[1].split("/")) + (m[2] or ":"), message
            )
        )


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands; none of a command without any."""
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def known_options(argv: Sequence[str], parser: argparse.ArgumentParser | None) -> list[str]:
    """The options of the subcommand that ``argv`` names, or of the command itself."""
    commands = {} if parser is None else subparsers_of(parser)
    command = next((commands[word] for word in argv if word in commands), None)
    command = command or parser
    if command is None:
        return []
    keys = (name for action in keys_of(command).values() for name in action.option_strings)
    return [*option_names(command).values(), *keys]


class ShowVersion(argparse.Action):
    """--version: found out only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        from tokenswift.cli.version import text

        print(text(), flush=True)
        parser.exit()


#: a parser, and what each of its subcommands runs
Parsers = tuple[Parser, dict[str, Callable[[argparse.Namespace], int | None]]]


def build_parser(argv: Sequence[str] = ()) -> Parsers:
    """The parser, and each subcommand's ``run``.

    Args:
        argv: a command line; where it begins with a subcommand, the others are left out, which is faster.
    """
    first = argv[0].replace("-", "_") if argv else None
    parser = Parser(
        prog="tokenswift",
        description="Write long text with open language models by speculative decoding: the tokens are those "
        "of plain decoding.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--version",
        action=ShowVersion,
        nargs=0,
        help="show the versions of tokenswift and what it runs on, and exit",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    runs: dict[str, Callable[[argparse.Namespace], int | None]] = {}
    names = (first,) if first in COMMANDS else COMMANDS
    for module_name in dict.fromkeys(MODULES.get(name, name) for name in names):
        module = import_module(f"tokenswift.cli.{module_name}")
        module.add_parser(subparsers)
        for name in subparsers.choices:
            runs.setdefault(name, module.run)
    for command in subparsers.choices.values():
        complete(command)
    return parser, runs


def main(argv: Sequence[str] | None = None, build: Callable[[Sequence[str]], Parsers] = build_parser) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code.

    Args:
        build: makes the parser of a command line, and what each subcommand runs; another program has its own.
    """
    with usable_streams() as is_open:
        return _main(list(sys.argv[1:] if argv is None else argv), is_open, build)


def _main(argv: list[str], is_open: bool, build: Callable[[Sequence[str]], Parsers]) -> int:
    handler = LogHandler()
    logger = logging.getLogger("tokenswift")
    level = logger.level
    logger.addHandler(handler)
    options: dict[str, str] = {}
    args = argparse.Namespace(debug="--debug" in argv)
    parser = None
    try:
        for word in argv:
            check_utf8(word)
        parser, runs = build(argv)
        if not argv:
            parser.print_help()
            return 0
        args = parser.parse_args(argv)
        if args.command is None:
            raise InputError(f"no command given; valid: {', '.join(runs)}, or --help")
        typed = {word.partition("=")[0] for word in argv}
        options = option_names(subparsers_of(parser)[args.command], typed)
        if hasattr(args, "method_help"):
            from tokenswift.cli.options import print_keys

            return print_keys(args)
        logger.setLevel(logging.ERROR if getattr(args, "quiet", False) else logging.INFO)
        if not is_open and args.command not in SILENT:
            return _fail(1, "standard output is closed; nothing was begun", args)
        code = runs[args.command](args) or 0
        sys.stdout.flush()
        return code
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt as error:
        word, code = getattr(error, "word", "interrupted"), getattr(error, "code", 130)
        return _fail(code, f"{word}{f'; {error}' if str(error) else ''}", args)
    except InputError as error:
        message = with_option_name(str(error), options)
        return _fail(2, with_suggestion(message, options.values() or known_options(argv, parser)), args)
    except BrokenPipeError as error:
        nothing = "; nothing more was generated" if hasattr(args, "max_new_tokens") else ""
        run = getattr(error, "run_dir", None)
        go_on = f"; continue with: tokenswift resume {run}" if run else ""
        return _fail(1, f"standard output was closed{nothing}{go_on}", args)
    except RunError as error:
        return _fail(1, with_option_name(str(error), options), args)
    except OSError as error:
        if error.filename == STANDARD_OUTPUT:
            return _fail(1, f"writing {STANDARD_OUTPUT} failed ({error.strerror or error})", args)
        where = f"{error.filename}: " if error.filename else ""
        return _fail(1, f"{where}{error.strerror or error}", args)
    except Exception as error:  # the last net: one line for the user, the traceback on request
        if is_out_of_memory(error):
            return _fail(1, f"out of memory{at_most(args)}", args)
        return _fail(1, f"the run failed ({type(error).__name__}: {error}); --debug shows where", args)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _fail(code: int, message: str, args: argparse.Namespace) -> int:
    if getattr(args, "debug", False) and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    say(" ".join(message.split()))
    return code


if __name__ == "__main__":
    sys.exit(main())
