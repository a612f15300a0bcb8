"""`Request`: the arguments of one generation, checked once. And their JSON forms: a record of
``--prompts`` or of a data set, and what ``--json`` writes. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Unpack

from tokenswift.chat.prompts import Prompt, is_chat
from tokenswift.checks import check_callback, keep_field, meant, shown
from tokenswift.config.fields import Between, check_fields
from tokenswift.config.sampling import (
    SamplingParams,
    check_texts,
    listed,
    sampling_over,
    settings_of,
)
from tokenswift.config.strategies import OnLoop, Strategy, build_options
from tokenswift.engine.arguments import GenerationArguments
from tokenswift.grammar import Grammar
from tokenswift.loader.chat_template import check_template_options
from tokenswift.types import Generation, InputError, OnProgress

LOGPROBS = Between(0, 20, "an integer from 0 to 20, or None")  # as OpenAI's interface has it
EXAMPLE = '{"prompt": "Once upon a time"}'
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OWN = ("max_new_tokens", "ignore_eos", "stop")  # fields of a record that are no sampling settings
SAMPLING = tuple(one.name for one in fields(SamplingParams))
INNER = ("conversation_digest", "new_turn")  # fields of a request that no caller sets
NOT_WRITTEN = ("metrics", "logprobs")  # of a generation: the figures stand by themselves
#: strategies that draft less the more texts share a pass; the others draft what they are set to
SHARED_STRATEGIES = ("auto", "autoregressive")
FIELDS = ("id", "prompt", "messages", *OWN, *SAMPLING)


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``LLM.generate``, which describes them; checked, with numbers as Python's
    own.

    Attributes:
        conversation_digest: of the conversation that the prompt's ids are of (see
            `run_journal.conversation_digest`), or None.
        new_turn: whether the prompt's ids are of a conversation whose answer is a new turn.
        options: the strategy's options as a dataclass.

    Raises:
        InputError: naming the argument, its value and what is valid.
    """

    prompt: Prompt
    max_new_tokens: int | None = None  # None: as `memory.default_length` has it
    strategy: Strategy | str = "auto"
    strategy_options: Mapping[str, Any] | None = None
    sampling: SamplingParams = SamplingParams()
    ignore_eos: bool = False
    stop: str | Sequence[str | Sequence[int]] = ()  # texts, or token ids
    on_loop: OnLoop = "report"
    run_dir: str | os.PathLike[str] | None = None
    on_progress: OnProgress | None = None
    logprobs: Annotated[int | None, LOGPROBS] = None
    template_options: Mapping[str, Any] | None = None
    conversation_digest: str | None = None
    new_turn: bool = False
    options: Any = field(default=None, init=False, compare=False)

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        default_sampling: Callable[[Prompt], SamplingParams],
        /,
        max_new_tokens: int | None = None,
        strategy: Strategy | str = "auto",
        strategy_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Request:
        """Make a request from the arguments of a call.

        Args:
            default_sampling: gives the default sampling for a prompt.
            sampling: None: the default sampling, with the sampling fields among the options.
            options: other fields of a request, fields of the sampling, and ``response_format``,
                which becomes the sampling's grammar.
        Raises:
            InputError: a name that no generation takes, sampling given twice, or as for the class.
        """
        check_names(options)
        chosen = {name: value for name, value in options.items() if name in SAMPLING}
        wanted = Grammar.of_format(options.get("response_format"))
        if sampling is None:
            sampling = sampling_over(default_sampling(prompt), chosen)
        elif chosen:
            both = f"sampling is given beside {' and '.join(chosen)}"
            raise InputError(f"{both}; valid: one of the two", "sampling")
        if wanted is not None and sampling.grammar is not None:
            both = "response_format is given beside a grammar of the sampling"
            raise InputError(f"{both}; valid: one of the two", "response_format")
        sampling = sampling if wanted is None else replace(sampling, grammar=wanted)
        return cls(
            prompt,
            max_new_tokens,
            strategy,
            strategy_options,
            sampling,
            ignore_eos=options.get("ignore_eos", False),
            stop=options.get("stop", ()),
            on_loop=options.get("on_loop", "report"),
            run_dir=options.get("run_dir"),
            on_progress=options.get("on_progress"),
            logprobs=options.get("logprobs"),
            template_options=options.get("template_options"),
        )

    def __post_init__(self) -> None:
        check_fields(self)
        keep_field(self, "options", build_options(self.strategy, self.strategy_options))
        if not isinstance(self.sampling, SamplingParams):
            valid = "None, or an object such as SamplingParams(seed=7)"
            raise InputError(f"sampling is {shown(self.sampling)}; valid: {valid}", "sampling")
        if self.sampling.grammar is not None:
            for name, value in (("acceptance", "published"), ("ignore_eos", True)):
                if value == getattr(self.options if name == "acceptance" else self, name, None):
                    raise InputError(
                        f"{name} is {value} beside a grammar; valid: one of the two", name
                    )
            if (least := self.sampling.min_tokens) > 0:  # a text that is complete can only end
                raise InputError(f"min_tokens is {least} beside a grammar; valid: 0", "min_tokens")
        keep_field(self, "stop", check_texts("stop", self.stop))
        check_template_options(self.template_options)
        check_callback("on_progress", self.on_progress)
        if self.run_dir is not None:
            if not isinstance(self.run_dir, str | os.PathLike):
                raise InputError(
                    f"run_dir is {shown(self.run_dir)}; valid: None, or the path of a folder"
                )
            keep_field(self, "run_dir", Path(self.run_dir))
        if self.logprobs is not None and self.run_dir is not None:
            raise InputError(
                "logprobs are not kept in a run_dir; valid: one of the two", "logprobs"
            )


def check_names(options: Iterable[str]) -> None:
    """Check the names of keywords that are passed on.

    Raises:
        InputError: naming one that no generation takes, and the one that was probably meant.
    """
    own = [one.name for one in fields(Request) if one.init and one.name not in INNER]
    known = [*own, "response_format", *SAMPLING]
    for name in options:
        if name not in known:
            valid = ", ".join(known) + meant(name, known)
            raise InputError(f"{name!r} is not an argument; valid: {valid}", name)


# ---- as JSON -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt.

    Attributes:
        name: of its folder.
        prompt: text, or messages.
        given: arguments of a request of its own, fields of the sampling among them.
    """

    name: str
    prompt: Prompt
    given: dict[str, Any]

    def request(
        self, call: Mapping[str, Any], usual: SamplingParams, folder: Path | None
    ) -> Request:
        """The request of it.

        Args:
            call: arguments of a request that its own stand over.
            usual: sampling settings that its own stand over.
            folder: of its run.
        Raises:
            InputError: naming what is wrong.
        """
        settings = {**call, **self.given, "sampling": None, "run_dir": folder}
        return Request.of(self.prompt, lambda _: usual, **settings)


def asked(record: Any, name: str) -> Asked:
    """A prompt from its record.

    Args:
        record: a JSON value.
        name: of the prompt, where the record has no ``id``.
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
    prompt: Any = record.get("prompt", record.get("messages"))
    if "prompt" in record and not (isinstance(prompt, str) and prompt):
        raise InputError(f"prompt is {shown(prompt)}; valid: text of at least one character")
    if "messages" in record and not is_chat(prompt):
        raise InputError(
            f"messages is {shown(prompt)}; valid: a list of objects with role and content"
        )
    given = {key: record[key] for key in (*OWN, *SAMPLING) if key in record}
    Request.of(prompt, lambda _: SamplingParams(), **given)
    return Asked(name, prompt, given)


def record_of(llm: Any, result: Generation, request: Request) -> dict[str, Any]:
    """The JSON record of a run (``docs/commands.md`` describes the fields)."""
    import torch

    from tokenswift.loader.identity import versions

    own = {
        one.name: getattr(result, one.name) for one in fields(result) if one.name not in NOT_WRITTEN
    }
    return {
        "model": llm.name,
        "strategy": request.strategy,
        "strategy_options": {
            name: listed(getattr(request.options, name)) for name in request.strategy_options or ()
        },
        "seed": request.sampling.seed,
        "sampling": settings_of(request.sampling),
        **own,
        **asdict(result.metrics),
        "distinct": list(result.metrics.distinct),
        "device": llm.device,
        "dtype": llm.dtype,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
