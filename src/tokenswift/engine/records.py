"""A prompt and a text as JSON objects: a line of ``--prompts`` or a row of a data set, and what ``--json``
writes. Light: no torch in here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import check_integer
from tokenswift.config import SamplingParams, check_flag, settings_of, shown
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError

if TYPE_CHECKING:
    from tokenswift.engine.request import Request

EXAMPLE = '{"prompt": "Once upon a time"}'
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OWN = ("max_new_tokens", "ignore_eos", "stop")  # fields of a record that are no sampling settings
SAMPLING = tuple(one.name for one in fields(SamplingParams))
FIELDS = ("id", "prompt", "messages", *OWN, *SAMPLING)


@dataclass(frozen=True)
class Asked:
    """A prompt.

    Attributes:
        name: of its folder.
        prompt: text, or messages.
        sampling: settings of its own.
        more: other arguments of a request.
    """

    name: str
    prompt: str | list[dict[str, Any]]
    sampling: dict[str, Any]
    more: dict[str, Any]

    def request(self, call: Mapping[str, Any], usual: SamplingParams, folder: Path | None) -> Request:
        """The request of it.

        Args:
            call: arguments of a request that its own stand over.
            usual: sampling settings that its own stand over.
            folder: of its run.
        Raises:
            InputError: naming what is wrong.
        """
        from tokenswift.engine.request import Request

        settings = {**call, **self.more, "sampling": replace(usual, **self.sampling), "run_dir": folder}
        return Request(self.prompt, **settings)

    def record(self) -> dict[str, Any]:
        """The JSON object that :func:`asked` makes it from."""
        kind = "prompt" if isinstance(self.prompt, str) else "messages"
        return {"id": self.name, kind: self.prompt, **self.sampling, **self.more}


def asked(record: Any, name: str) -> Asked:
    """A prompt from its record.

    Args:
        record: a JSON value.
        name: of the prompt, where the record has no ``id``.
    Raises:
        InputError: naming the field that is wrong.
    """
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError(f"it has neither prompt nor messages, or both; valid: an object such as {EXAMPLE}")
    for key in record:
        if key not in FIELDS:
            raise InputError(f"{shown(key)} is not a field; valid: {', '.join(FIELDS)}")
    name = str(record.get("id", name))
    if not NAME.fullmatch(name):
        raise InputError(f"id is {shown(name)}; valid: up to 100 letters, digits, dots, - and _")
    prompt: Any = record.get("prompt", record.get("messages"))
    if "prompt" in record and not (isinstance(prompt, str) and prompt):
        raise InputError(f"prompt is {shown(prompt)}; valid: text of at least one character")
    if "messages" in record and not is_chat(prompt):
        raise InputError(f"messages is {shown(prompt)}; valid: a list of objects with role and content")
    more = {key: record[key] for key in OWN if key in record}
    if "max_new_tokens" in more:
        check_integer("max_new_tokens", more["max_new_tokens"], 1)
    if "ignore_eos" in more:
        check_flag("ignore_eos", more["ignore_eos"])
    sampling = {key: record[key] for key in SAMPLING if key in record}
    SamplingParams(**sampling)
    return Asked(name, prompt, sampling, more)


def record_of(
    llm: Any, result: Generation, strategy: str, options: Mapping[str, Any], sampling: SamplingParams
) -> dict[str, Any]:
    """The JSON record of a run (``docs/commands.md`` describes the fields)."""
    import torch

    from tokenswift.loader.identity import versions

    metrics = asdict(result.metrics)
    return {
        "model": llm.name,
        "strategy": strategy,
        "strategy_options": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        "seed": sampling.seed,
        "sampling": settings_of(sampling),
        "lossless": result.lossless,
        "prompt_tokens": result.prompt_tokens,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        **metrics,
        "distinct": list(result.metrics.distinct),
        "heads": result.heads,
        "draft_source": result.draft_source,
        "token_sources": result.token_sources,
        "drafting": result.drafting,
        "device": llm.device,
        "dtype": llm.dtype,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
