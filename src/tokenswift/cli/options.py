"""Options of commands and how they are read: a field of a dataclass is an option, and its class's
docstring says what it is.

::

    @dataclass(frozen=True)
    class Length:
        \"\"\"How much is written.

        Attributes:
            max_new_tokens: tokens to write at most, at least 1
        \"\"\"

        max_new_tokens: int = option(200, least=1)

``add_options(parser, Length)`` makes ``--max-new-tokens N``, with the default in its help, and
refuses 0. Text is answered where the model has a chat template, however it comes; token ids are
continued. ``--continue`` has text continued, too; ``--system`` insists on an answer. Light: no
torch in here.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tokenswift.cli.terminal import Stages
from tokenswift.config.loading import HEAD_KINDS, LoadConfig
from tokenswift.config.sampling import ADJUSTING, SamplingParams, preset, sampling_over
from tokenswift.config.strategies import OPTIONS, MethodOptions, build_options, names_of
from tokenswift.files import line_of
from tokenswift.loader.find import DEFAULT, HUB_ID, check_name
from tokenswift.types import InputError, check_choice, meant

#: short names of options, the same in every command
SHORT = {"model": "-m", "max_new_tokens": "-n", "seed": "-s", "temperature": "-t", "verbose": "-v"}
#: the options that ``--help`` shows; ``--help-all`` shows all
USUAL = frozenset(
    "prompt prompt_file raw system max_new_tokens model heads dtype device strategy temperature "
    "top_k top_p "
    "min_p repetition_penalty seed json output run_dir quiet prompts out at_once contexts "
    "repeats seeds "
    "no_measure folder text kind num_heads data work "
    "tokens epochs steps lr batch host port api_key_file served_model_name max_concurrent queue "
    "max_tokens "
    "max_prompt".split()
)


def option(default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    Args:
        default: None stands for what the text says; without one it has to be given.
        metavar: placeholder of its value, by its type where it is not given.
        more: ``names``, in place of the usual one; ``least`` of a number, and ``valid``, that in
            words; ``place``, for an argument without a name; anything else is argparse's.
    """
    return field(
        default=default, metadata=more if metavar is None else {"metavar": metavar, **more}
    )


def reader(read: Callable[[str], Any], valid: str) -> Callable[[str], Any]:
    """An argparse type: what ``read`` makes of a text; one that it refuses is told with what is
    valid."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            given = text if re.fullmatch("-?[0-9]+", text) else repr(text)
            raise argparse.ArgumentTypeError(f"is {given}; valid: {valid}") from None

    return parse


def integer(least: int, valid: str | None = None) -> Callable[[str], int]:
    """An argparse type: an integer of at least ``least``."""

    def read(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    return reader(read, valid or f"an integer of at least {least}")


def _widths(text: str) -> tuple[int, ...] | None:
    return None if text == "auto" else tuple(int(width) for width in text.split(","))


def _biases(text: str) -> list[tuple[int, float]]:
    pairs = [part.split("=") for part in text.split(",")] if text != "none" else []
    return [(int(token), float(bias)) for token, bias in pairs]


BIASES = "token ids with a bias each, such as 198=-5,11=2, or none"
#: type of a field → how its value is read, and its placeholder
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (reader(int, "an integer"), "N"),
    "float": (reader(float, "a number"), "X"),  # its range is checked later, NaN included
    "Path": (Path, "FILE"),
    "tuple[int, ...]": (
        reader(_widths, "auto, or integers of at least 1, such as 1,3,3,3"),
        "N,N,…",
    ),
    "Texts": (lambda text: [] if text == "none" else [text], "TEXT"),
    "Biases": (reader(_biases, BIASES), "ID=X,…"),
}
ADDED = ("Texts", "Biases")  # several of these options add up


def texts_of(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes, as one line each."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        entries = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE):
            found |= dict.fromkeys(
                names.split(", "), " ".join(text.replace("`", "").split()).removesuffix(".")
            )
    return found


def add_options(
    to: Any,
    kind: type,
    only: Collection[str] = (),
    unset: bool = False,
    **defaults: Any,
) -> None:
    """Give a parser, or a group of one, an option for each field.

    Args:
        only: these fields alone; () for all.
        unset: what is not given is None, also where there is a default.
        defaults: over those of the fields.
    """
    said = texts_of(kind)
    for one in fields(kind):
        if not only or one.name in only:
            text = re.sub(
                r"(?<=\(see )\w+", lambda found: f"--{dashed(found[0])}", said.get(one.name, "")
            )
            add_option(to, one, text, defaults.get(one.name, one.default), unset)


def add_option(to: Any, one: Field[Any], text: str, default: Any, unset: bool = False) -> None:
    """One option; its default is added to its text where that says none."""
    how: dict[str, Any] = dict(one.metadata)
    names, place, least, valid = (
        how.pop(name, None) for name in ("names", "place", "least", "valid")
    )
    type_name = str(one.type).partition(" | ")[0]
    if type_name == "bool":
        how["action"] = "store_true"
    else:
        read, usual = KINDS.get(type_name, (str, "NAME"))
        read = read if least is None else integer(least, valid)
        added = {"action": "extend"} if type_name in ADDED else {}
        how = {"type": read, "metavar": usual, **added, **how}
        if default not in (MISSING, None, (), []) and "default" not in text:
            text += f"; default: {shown(default)}"
    called = [SHORT.get(one.name), *(names or [f"--{dashed(one.name)}"])]
    if not place:
        how |= {"dest": one.name, "required": default is MISSING}
    how["default"] = None if unset or default is MISSING else [] if default == () else default
    text = text.replace("%", "%%")
    brief = "; ".join([text.partition("; ")[0], *re.findall(r"; (default: \S+)$", text)])
    made = to.add_argument(*([one.name] if place else filter(None, called)), **how)
    made.help, made.text = brief if one.name in USUAL else argparse.SUPPRESS, text


def dashed(name: str) -> str:
    """A field as an option is called."""
    return name.replace("_", "-")


def shown(default: Any) -> str:
    """A default as it is typed."""
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


class HelpAll(argparse.Action):
    """--help-all: the help with rare options too, and with all of each text, not only its first
    clause."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "text", action.help)
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ordinary :class:`InputError`\\ s (no usage dump, no
    exit)."""

    def __init__(self, **kwargs: Any) -> None:
        wrapped = {"formatter_class": partial(argparse.HelpFormatter, max_help_position=30)}
        super().__init__(**{"allow_abbrev": False, "add_help": False, **wrapped, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; refuses what it does not know with the option that is probably meant."""
        made, rest = self.parse_known_args(args, namespace)
        if rest:
            given = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            known = getattr(made, "parser", self)._option_string_actions
            valid = "the options of --help-all, and quotes around a text of several words"
            raise InputError(f"unknown argument {given}; valid: {valid}{meant(given, known)}")
        return made

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError` with argparse's message, an option by its long name."""
        found = re.match(r"argument (?:-\w/)?([^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if found:
            message = f"{found[1]}{' ' if found[2].startswith('is ') else ': '}{found[2]}"
        raise InputError(message)

    def in_words(self, message: str) -> str:
        """The message with fields written as the options that set them: the one that it begins
        with, and names with an underscore anywhere."""
        options = {one.dest: one.option_strings[-1] for one in self._actions if one.option_strings}
        names = r"^(?!out of )'?\w+'?(?=[ :])|(?<![\w./-])\w+_\w+(?![\w./-])"  # not --out of memory
        return re.sub(names, lambda found: options.get(found[0].strip("'"), found[0]), message)


def command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    words: str,
    places: str = "",
) -> Parser:
    """The parser of a subcommand.

    Args:
        run: what it does; its docstring is the description.
        words: beside its name in the list of commands.
        places: its arguments without a name, for the line of usage.
    """
    text = " ".join(inspect.cleandoc(run.__doc__ or "").split())
    usage = f"tokenswift {name} [options] {places}".strip()
    parser = subparsers.add_parser(name, help=words, description=text, usage=usage)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("-h", "--help", action="help", help="show the usual options, and exit")
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options, and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


# ---- options that commands share -----------------------------------------------------------------


logger = logging.getLogger("tokenswift")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name != "grammar"]
LOADING = [one.name for one in fields(LoadConfig)]
METHOD = list(dict.fromkeys(one.name for kind in OPTIONS.values() for one in fields(kind)))


@dataclass(frozen=True)
class Model:
    """Which model, and what drafts for it.

    Attributes:
        model: alias, folder, hub id or GGUF file; a GGUF file of the hub is owner/name:file.gguf;
            the default is downloaded once; default: smollm2-135m
        heads: draft heads: a file, folder or hub id, auto or none; auto takes those that ship with
            the model; conditioned, linear (the paper's) and medusa are kinds that ship
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id, shipped, none, or auto
            (the one that tokenswift train made for it)
    """

    model: str = option(DEFAULT, "M")
    heads: str = option("auto", "PATH")
    eagle: str = option("auto", "PATH")


@dataclass(frozen=True)
class Preset:
    """Sampling settings that belong together.

    Attributes:
        preset: sampling settings by name: paper; other options override it
    """

    preset: str | None = option(None)


@dataclass(frozen=True)
class Quiet:
    """Verbosity.

    Attributes:
        quiet: nothing on standard error except errors
    """

    quiet: bool = option(False)


@dataclass(frozen=True)
class Record(Quiet):
    """Results as JSON.

    Attributes:
        json: write JSON records, one a line, to this file; with - or no FILE, to standard output in
            place of the text
    """

    json: str | None = option(None, "FILE", nargs="?", const="-")


@dataclass(frozen=True)
class Shown(Quiet):
    """Verbosity of summaries.

    Attributes:
        verbose: figures of drafting in the summary: passes, acceptance, sources of drafts
    """

    verbose: bool = option(False)


def add_model_options(parser: Parser, dtype: str = "auto") -> None:
    """The fields of :class:`Model` and of `LoadConfig`."""
    group = parser.add_argument_group("model")
    add_options(group, Model)
    add_options(group, LoadConfig, dtype=dtype)


def add_sampling_options(
    parser: Parser,
    title: str = "sampling (defaults of continued text; answers take the model's own settings)",
    plain: bool = False,
    **usual: Any,
) -> None:
    """The fields of `SamplingParams`, seed included, and --preset.

    Args:
        plain: without what goes by more of a text than the contextual penalty.
        usual: defaults that are told.
    """
    group = parser.add_argument_group(title)
    only = [name for name in SAMPLING if not (plain and name in ADJUSTING)]
    add_options(group, SamplingParams, only, unset=True, **usual)
    add_options(group, Preset)


def add_strategy_options(parser: Parser, strategy: str = "auto") -> None:
    """--strategy, and every field of the strategies' options, with the default of each that has
    it."""
    group = parser.add_argument_group("method (changes the speed, never the text)")
    names = [*OPTIONS, *(["all"] if strategy == "all" else [])]
    words = (
        f"drafting method: {', '.join(names)}; --help-all shows the options of each; "
        f"default: {strategy}"
    )
    group.add_argument("--strategy", default=strategy, metavar="S", help=words)
    texts = texts_of(MethodOptions)
    for name in METHOD:
        owners = {
            key: one for key, kind in OPTIONS.items() for one in fields(kind) if one.name == name
        }
        usual = [
            key if one.default is None else f"{key}: {shown(one.default)}"
            for key, one in owners.items()
        ]
        add_option(group, next(iter(owners.values())), f"{texts[name]} ({'; '.join(usual)})", None)


def sampling_from(args: argparse.Namespace, usual: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters: what the command line names, over ``usual``, by default the class's.

    Raises:
        InputError: naming the bad field.
    """
    return sampling_over(usual or SamplingParams(), given_sampling(args))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that the command line names, those of --preset included."""
    given = {name: getattr(args, name, None) for name in SAMPLING}
    given = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    return given if args.preset is None else {**preset(args.preset), **given}


def strategy_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that were given, checked against the strategy; with ``all`` each must
    suit the strategies that have it, which get it. InputError names the bad one."""
    given = {name: getattr(args, name) for name in METHOD if getattr(args, name) is not None}
    for strategy in OPTIONS if args.strategy == "all" else [args.strategy]:
        check_choice("strategy", strategy, tuple(OPTIONS))
        known = (
            given
            if args.strategy != "all"
            else [name for name in given if name in names_of(strategy)]
        )
        build_options(strategy, {name: given[name] for name in known})
    return given


def check_model_options(args: argparse.Namespace) -> None:
    """What can be checked before anything is loaded."""
    check_name(args.model)
    LoadConfig(**loading_of(args))
    check_heads(args.heads)
    check_name(args.eagle, "eagle")


def check_heads(heads: str) -> None:
    """Raise :class:`InputError` where --heads names a file that is not there."""
    path, kinds = Path(heads).expanduser(), ", ".join(HEAD_KINDS)
    shaped = path.suffix != ".safetensors" and HUB_ID.fullmatch(heads) and ".." not in heads
    if heads not in ("auto", "none", *HEAD_KINDS) and not path.exists() and not shaped:
        valid = (
            f"auto, none, shipped ones by kind ({kinds}), a heads file, or a folder or hub "
            f"id with heads"
        )
        raise InputError(f"heads is {heads!r}: no such file; valid: {valid}")


def load_model(args: argparse.Namespace) -> Any:
    """The ``LLM`` that the model options name; says so before anything heavy is imported."""
    logger.info("loading %s", args.model)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.llm import LLM

        llm = LLM(
            args.model, **loading_of(args), heads=args.heads, eagle=args.eagle, on_progress=stages
        )
    strategy = f", {args.strategy}" if hasattr(args, "strategy") else ""
    logger.info("%s, %s on %s%s", llm.name, llm.dtype, llm.device, strategy)
    wide = llm.target.wide_layers
    if getattr(args, "verbose", False) and wide:
        logger.info("keys are of 16 bits in layers %s", ", ".join(map(str, wide)))
    return llm


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `LoadConfig` that the model options are."""
    return {name: getattr(args, name) for name in LOADING}


# ---- prompts: what is read -----------------------------------------------------------------------


def _ids(text: str) -> list[int]:
    ids = [int(token) for token in text.replace(",", " ").split()]
    if min(ids, default=0) < 0:
        raise ValueError
    return ids


#: an argparse type: token ids with commas or spaces between them
token_ids = reader(_ids, "integers such as 1,2,3, no negative ids")


def prompt_from(args: argparse.Namespace) -> str | list[int]:
    """The one prompt given: text, the text of a file or of standard input (``-``, or nothing else),
    or token ids. What a pipe brings beside an argument stands before it."""
    text, file = (None, "-") if args.prompt == "-" else (args.prompt, args.prompt_file)
    sources = {"PROMPT": text, "--prompt-file": file, "--prompt-ids": args.prompt_ids}
    given = [name for name, value in sources.items() if value is not None]
    piped = piped_text(text is not None) if given in ([], ["PROMPT"]) else None
    if len(given) > 1 or (not given and piped is None):
        what = " and ".join(given) or "no prompt"
        valid = f"one of {', '.join(sources)}, or a pipe (- reads standard input)"
        raise InputError(f"{what} given; valid: {valid}")
    if file is not None:
        text = read_named(file, "--prompt-file")
    elif piped:
        text = f"{piped}\n\n{text}" if text else piped
    prompt = args.prompt_ids or text
    if not prompt:
        raise InputError(
            f"{given[0] if given else 'standard input'} is empty; valid: at least one token"
        )
    return prompt


def piped_text(beside: bool) -> str | None:
    """The text of a pipe or a file at standard input; None: it is a terminal, a device, or closed.

    Args:
        beside: an argument is the prompt already. A socket, which programs that start this one may
            leave open for ever, is not read then.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    waits = stat.S_ISFIFO(mode) or (stat.S_ISSOCK(mode) and not beside)
    if waits and beside:  # whoever started this may have left it open
        logger.info("reading standard input, which stands before PROMPT (</dev/null leaves it out)")
    return read_named("-", "standard input") if waits or stat.S_ISREG(mode) else None


def read_named(name: str, option: str) -> str:
    """The UTF-8 text of a file, or of standard input: without a byte order mark, CRLF as LF, and
    without the one line end that shells and editors put at the end."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option} {name} is not UTF-8 (byte {error.start}); valid: UTF-8 text"
        ) from error
    except (AttributeError, OSError, ValueError) as error:  # standard input may be closed
        valid = "valid: a UTF-8 text file"
        raise InputError(f"{option} {name} cannot be read ({line_of(error)}); {valid}") from error


# ---- prompts: how they are taken -----------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: system prompt; default: the chat template's own
        template_options: variables of the model's chat template, such as {"enable_thinking": false}
    """

    system: str | None = option(None, "TEXT")
    template_options: Any = option(None, "JSON", type=reader(json.loads, "a JSON object"))


def shaped(args: argparse.Namespace, llm: Any, prompt: str | list[int]) -> tuple[Any, str]:
    """The prompt as ``LLM.generate`` takes it, and a line that says how it was taken.

    Returns:
        chat messages when it is to be answered, else the prompt itself.
    Raises:
        InputError: a chat is asked for and the model has no template.
    """
    if not isinstance(prompt, str):
        return prompt, "prompt: token ids, continued as they are"
    if args.raw:
        return prompt, "prompt: continued as it is"
    if args.system is not None:
        check_template(llm, "--system")
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    told = "prompt: answered, through the model's chat template (--continue continues it instead)"
    return asking(args.system, prompt), told


def check_template(llm: Any, what: str) -> None:
    """Refuse a model without a chat template; ``what`` asks for one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model "
            f"made for chat, "
            f"or tokenswift generate --continue"
        )


def asking(system: str | None, text: str) -> list[dict[str, str]]:
    """A conversation that begins with a text of the user."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
