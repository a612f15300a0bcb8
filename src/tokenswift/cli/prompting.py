"""Whether a prompt is answered, through the model's chat template, or continued.

Text is answered where the model has a template, however it comes; token ids are continued. ``--continue``
(``--raw`` before) has text continued, too; ``--chat`` and ``--system`` insist on an answer. Light: no torch
in here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import RARE, option
from tokenswift.config import SamplingParams, sampling_over
from tokenswift.loader.prompts import check_template_options
from tokenswift.types import InputError


@dataclass(frozen=True)
class Chat:
    """Whether a prompt is answered.

    Attributes:
        raw: continue the prompt as it is; default: a model that has a chat template answers it, whether it
            comes as an argument, by a pipe or from a file
        chat: answer the prompt; refused where the model has no chat template
    """

    raw: bool = option(False, shown="--continue")
    chat: bool = option(False, level=RARE)


def template_option(text: str) -> tuple[str, Any]:
    """An argparse type: a variable of a chat template and its value, JSON or else text."""
    name, found, value = text.partition("=")
    if not name or not found:
        valid = "a name and a value, such as enable_thinking=false"
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: {valid}")
    try:
        check_template_options({name: value})
        return name, json.loads(value)
    except InputError as error:
        valid = str(error).partition("; ")[2]
        raise argparse.ArgumentTypeError(f"is {text!r}; {valid}") from error
    except (ValueError, RecursionError):
        return name, value


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: system prompt; default: the chat template's own
        template_option: variable of the model's chat template, such as enable_thinking=false; the value is
            JSON or text; may be given several times
    """

    system: str | None = option(None, "TEXT")
    template_option: list[tuple[str, Any]] = option(
        (), "NAME=VALUE", type=template_option, action="append", level=RARE
    )


def prepare(args: argparse.Namespace) -> None:
    """Start what renders chat templates before the model is loaded, where it may be needed."""
    if not args.raw and args.prompt_ids is None:
        from tokenswift.loader.template import prepare

        prepare()


def check_chat_options(args: argparse.Namespace) -> None:
    """What can be checked without the model.

    Raises:
        InputError: options that contradict each other.
    """
    for name in ("chat", "system", "template_option"):
        if getattr(args, name) in (None, False, []):
            continue
        option = f"--{name.replace('_', '-')}"
        if args.raw and args.prompts is None:
            raise InputError(
                f"--continue and {option} given; valid: one of them (--continue uses no chat template)"
            )
        if args.prompt_ids is not None:
            raise InputError(f"--prompt-ids and {option} given; valid: {option} with text")


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
    if args.chat or args.system is not None:
        check_template(llm, "--chat" if args.chat else "--system")
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    told = "prompt: answered, through the model's chat template (--continue continues it instead)"
    return [*system_messages(args.system), {"role": "user", "content": prompt}], told


def check_template(llm: Any, what: str) -> None:
    """Refuse a model without a chat template; ``what`` asks for one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model made for chat, "
            f"or tokenswift generate --continue"
        )


def system_messages(text: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]


def answer_sampling(args: argparse.Namespace, made: SamplingParams, llm: Any) -> SamplingParams:
    """The sampling parameters of an answer: what is usual for one, and what the command line names over it.

    Args:
        made: from the command line, with --sampling model the model's own included.
    """
    if args.sampling != "default":
        return made
    usual = llm.default_sampling([{"role": "user", "content": ""}])
    return replace(sampling_over(usual, options.given_sampling(args)), grammar=made.grammar)
