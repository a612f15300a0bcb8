"""Whether a prompt is answered, through the model's chat template, or continued as it is.

A prompt given as an argument is answered where the model has a template; files, standard input and token
ids are continued. ``--raw``, ``--chat`` and ``--system`` say otherwise. Light: no torch in here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.cli.declare import option
from tokenswift.config import CHAT_TEMPERATURE, SamplingParams
from tokenswift.types import InputError


@dataclass(frozen=True)
class Chat:
    """Whether a prompt is answered.

    Attributes:
        raw: continue PROMPT as it is; default: it is answered, through the model's chat template, where the
            model has one
        chat: have the prompt answered, from a file or standard input too; default: those are continued as
            they are. Answers are sampled at temperature 0.2 unless --temperature or --sampling is given
    """

    raw: bool = option(False)
    chat: bool = option(False)


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: instructions that stand before the conversation; a prompt is answered then, as with --chat;
            default: the template's own
    """

    system: str | None = option(None, "TEXT")


def check_chat_options(args: argparse.Namespace) -> None:
    """What can be checked without the model.

    Raises:
        InputError: options that contradict each other.
    """
    for name in ("chat", "system"):
        if getattr(args, name) in (None, False):
            continue
        if args.raw:
            raise InputError(f"--raw and --{name} given; valid: one of them (--raw uses no chat template)")
        if args.prompt_ids is not None:
            raise InputError(f"--prompt-ids and --{name} given; valid: --{name} with text")


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
    wanted, argument = args.chat or args.system is not None, args.prompt not in (None, "-")
    if wanted:
        check_template(llm, "--chat" if args.chat else "--system")
    elif not argument:
        return prompt, "prompt: continued as it is (--chat has it answered)"
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    told = "prompt: answered, through the model's chat template (--raw continues it as it is)"
    return [*system_messages(args.system), {"role": "user", "content": prompt}], told


def check_template(llm: Any, what: str) -> None:
    """Refuse a model without a chat template; ``what`` asks for one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model made for chat, "
            f"or tokenswift generate --raw"
        )


def system_messages(text: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]


def answer_sampling(args: argparse.Namespace, made: SamplingParams) -> SamplingParams:
    """The sampling parameters of an answer: a low temperature where none was asked for.

    Args:
        made: from the command line, the model's file included.
    """
    if args.sampling != "default" or args.temperature is not None or made.greedy:
        return made
    return replace(made, temperature=CHAT_TEMPERATURE)
