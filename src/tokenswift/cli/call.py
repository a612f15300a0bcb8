"""The arguments of a call: options of one text, and the request made of them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from tokenswift.chat.prompts import is_chat
from tokenswift.cli import options
from tokenswift.cli.declare import Parser, add_options, dashed
from tokenswift.cli.lengths import default_min_tokens
from tokenswift.cli.prompts import TOKEN_IDS, System, prompt_for_model, prompt_from, read_named
from tokenswift.config.fields import SHOWN, AtLeast, Option
from tokenswift.config.sampling import CONTINUED
from tokenswift.engine.arguments import CallArguments, call_arguments
from tokenswift.engine.request import Request
from tokenswift.grammar import Grammar
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM
    from tokenswift.runs.records import RunState

logger = logging.getLogger("tokenswift")
#: options that are arguments of a request, by the same names
REQUEST_OPTIONS = ("max_new_tokens", "strategy", "ignore_eos", "on_loop")
SHOWN_CHARACTERS = 80  # of a grammar in a message
GRAMMARS = {"json_schema": Grammar.json_schema, "regex": Grammar.regex, "grammar": Grammar.lark}


@dataclass(frozen=True)
class Prompt:
    """What is answered or continued.

    Attributes:
        prompt: text to answer, or to continue (see --continue); text from a pipe is the prompt, or
            is put before PROMPT; - reads standard input
        prompt_file: UTF-8 file with that text; - reads standard input
        prompt_ids: token ids instead of text, 0 or more each
        raw: continue the prompt as it is; default: a model that has a chat template answers it,
            whether it comes as an argument, from a pipe or from a file
    """

    prompt: Annotated[str | None, Option("PROMPT", shown=True, positional=True)] = None
    prompt_file: Annotated[str | None, Option("F", shown=True)] = None
    prompt_ids: Annotated[list[int] | None, TOKEN_IDS] = None
    raw: Annotated[bool, Option(shown=True, names=("--continue",))] = False


@dataclass(frozen=True)
class Text:
    """What is written.

    Attributes:
        max_new_tokens: tokens to write, at least 1; an answer ends where the model ends it, and so
            does a continued text of fewer than 1,000 tokens; a longer one is written to this length
            (see min_tokens); default: an answer ends by itself, a continued text after 200
        json_schema: write JSON that follows this schema: a file, or {…}; the schema itself is an
            object, such as {"type": "object"}
        regex: write text that this regular expression matches from its beginning to its end
        grammar: write text that follows the grammar in this file, in Lark's syntax
        stop: end before this text; the text is left out; may be given several times; default: none
        stop_ids: end after these tokens; the last one adds no text; may be given several times;
            default: none
        ignore_eos: continue after an end-of-text token
        on_loop: what to do when the text repeats itself: report (continue and say so), stop, or
            copies (stop at exact copies in a row, but not where it changes words or only the form
            of its sentences repeats)
    """

    max_new_tokens: Annotated[int | None, AtLeast(1), Option(shown=True, short="-n")] = None
    json_schema: Annotated[str | None, Option("FILE", shown=True)] = None
    regex: Annotated[str | None, Option("TEXT")] = None
    grammar: Annotated[str | None, Option("FILE")] = None
    stop: Annotated[Sequence[str], Option("TEXT", shown=True, repeatable=True)] = ()
    stop_ids: Annotated[Sequence[list[int]], replace(TOKEN_IDS, repeatable=True)] = ()
    ignore_eos: Annotated[bool, SHOWN] = False
    on_loop: Annotated[str, Option("W")] = "report"


def add_call_options(parser: Parser) -> None:
    """What is to be written and how: prompt, length, model, method, sampling."""
    group = parser.add_argument_group("prompt and length")
    for kind in (Prompt, System, Text):
        add_options(group, kind)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser, **asdict(CONTINUED))


def call_from(args: argparse.Namespace) -> tuple[str | list[int], CallArguments]:
    """The prompt of the command line, and the other arguments of a request; everything that needs
    no model is checked. :func:`request_for_model` makes the request.

    Raises:
        InputError: naming what is wrong.
    """
    continuing = "--prompt-ids" if args.prompt_ids is not None else ""
    if args.raw:
        continuing = "--continue"
    if args.system is not None and continuing:
        raise InputError(f"--system and {continuing} given; valid: one of them")
    return prompt_from(args), settings_from(args)


def settings_from(args: argparse.Namespace) -> CallArguments:
    """The arguments of a request besides its prompt, those of its sampling that the command line
    names among them.

    Raises:
        InputError: naming what is wrong.
    """
    options.check_model_options(args)
    values: dict[str, object] = {name: getattr(args, name) for name in REQUEST_OPTIONS}
    values |= options.sampling_options(args)
    values["strategy_options"] = options.strategy_options_from(args)
    values["grammar"] = grammar_from(args)
    values["stop"] = (*args.stop, *map(tuple, args.stop_ids))
    values["template_options"] = args.template_options
    settings = call_arguments(values)
    Request.of("", lambda _: CONTINUED, **settings)  # checks them
    return settings


def grammar_from(args: argparse.Namespace) -> Grammar | None:
    """What the text has to be like, as far as that is known without a model.

    Raises:
        InputError: several grammars, or a file that cannot be read or that holds none.
    """
    names = [name for name in GRAMMARS if getattr(args, name) is not None]
    if not names:
        return None
    if len(names) > 1:
        listed = " and ".join(f"--{dashed(name)}" for name in names)
        raise InputError(f"{listed} given; valid: one of them")
    name = names[0]
    option = f"--{dashed(name)}"
    text: str = getattr(args, name)
    is_file = name != "regex" and not (name == "json_schema" and text.lstrip().startswith("{"))
    content = read_named(text, option) if is_file else text
    try:
        return GRAMMARS[name](content)
    except InputError as error:
        place = f"{option} {text[:SHOWN_CHARACTERS]}" if is_file else option
        raise InputError(f"{place}: {error}") from error


def request_for_model(
    args: argparse.Namespace,
    llm: LLM,
    prompt: str | list[int],
    settings: CallArguments,
    earlier: RunState | None = None,
) -> Request:
    """The request, its prompt as the model takes it and its sampling settled; says which way.

    Args:
        prompt, settings: as of :func:`call_from`.
        earlier: the run that goes on.
    """
    model_prompt, line = prompt_for_model(args, llm, prompt)
    logger.info("%s", line)
    if is_chat(model_prompt) and args.max_new_tokens is None and args.on_loop == Text.on_loop:
        settings = {**settings, "on_loop": "copies"}  # a loop would go on to the last position
    if "min_tokens" not in settings:
        min_tokens = default_min_tokens(model_prompt, settings, earlier)
        settings = {**settings, "min_tokens": min_tokens}
        if min_tokens:
            logger.info("the model cannot end it before token %d (--min-tokens)", min_tokens)
    return Request.of(model_prompt, llm.default_sampling, **settings)
