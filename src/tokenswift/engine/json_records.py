"""JSON forms of a generation: a record of ``--prompts`` or of a data set, and what ``--json``
writes. Imports no torch before a record is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.checks import shown
from tokenswift.config.sampling import SamplingParams, listed, settings_of
from tokenswift.engine.arguments import call_arguments
from tokenswift.engine.request import SAMPLING, Request
from tokenswift.types import Generation, InputError

if TYPE_CHECKING:  # it imports torch
    from tokenswift.engine.llm import LLM

EXAMPLE = '{"prompt": "Once upon a time"}'
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: fields of a record that are arguments of a request
ARGUMENTS = ("max_new_tokens", "ignore_eos", "stop", *SAMPLING)
FIELDS = ("id", "prompt", "messages", *ARGUMENTS)
#: of a generation: the figures stand by themselves
NOT_WRITTEN = ("metrics", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class PromptRecord:
    """A prompt with arguments of its own, as a line of ``--prompts`` or a row of a data set has it.

    Attributes:
        name: the name of its folder.
        prompt: text, or messages.
        arguments: arguments of a request, fields of the sampling among them.
    """

    name: str
    prompt: Prompt
    arguments: Mapping[str, object]

    def request(
        self,
        shared_arguments: Mapping[str, object],
        default_sampling: SamplingParams,
        folder: Path | None,
    ) -> Request:
        """The request of it.

        Args:
            shared_arguments: arguments of all records, over which its own stand.
            default_sampling: sampling settings over which its own stand.
            folder: the folder of its run.
        Raises:
            InputError: naming what is wrong.
        """
        arguments = call_arguments({**shared_arguments, **self.arguments})
        arguments["sampling"] = None
        arguments["run_dir"] = folder
        return Request.of(self.prompt, lambda _: default_sampling, **arguments)


def parse_prompt_record(record: object, name: str) -> PromptRecord:
    """Read a prompt from its record.

    Args:
        record: a JSON value.
        name: the name of the prompt, where the record has no ``id``.
    Raises:
        InputError: naming the field that is wrong.
    """
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError(
            f"it has neither prompt nor messages, or both; valid: an object such as {EXAMPLE}"
        )
    for key in record:
        if key not in FIELDS:
            raise InputError(f"{shown(key)} is not a field; valid: {', '.join(FIELDS)}")
    name = str(record.get("id", name))
    if not NAME.fullmatch(name):
        raise InputError(f"id is {shown(name)}; valid: up to 100 letters, digits, dots, - and _")
    arguments = {key: record[key] for key in ARGUMENTS if key in record}
    parsed = PromptRecord(name, _prompt_of(record), arguments)
    parsed.request({}, SamplingParams(), None)  # checks the arguments
    return parsed


def _prompt_of(record: Mapping[str, object]) -> Prompt:
    """The text or the messages of a record that has one of the two."""
    if "prompt" in record:
        text = record["prompt"]
        if isinstance(text, str) and text:
            return text
        raise InputError(f"prompt is {shown(text)}; valid: text of at least one character")
    messages = record["messages"]
    if is_chat(messages):
        return messages
    raise InputError(
        f"messages is {shown(messages)}; valid: a list of objects with role and content"
    )


def record_of(llm: LLM, result: Generation, request: Request) -> dict[str, object]:
    """The JSON record of a run (``docs/commands.md`` describes the fields)."""
    import torch

    from tokenswift.loader.identity import versions

    generation = {
        field.name: getattr(result, field.name)
        for field in fields(result)
        if field.name not in NOT_WRITTEN
    }
    strategy_options = {
        name: listed(getattr(request.options, name)) for name in request.strategy_options or ()
    }
    return {
        "model": llm.name,
        "strategy": request.strategy,
        "strategy_options": strategy_options,
        "seed": request.sampling.seed,
        "sampling": settings_of(request.sampling),
        **generation,
        **asdict(result.metrics),
        "distinct": list(result.metrics.distinct),
        "device": llm.device,
        "dtype": llm.dtype,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
