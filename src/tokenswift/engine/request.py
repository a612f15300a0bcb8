"""`Request`: the arguments of one generation, checked once. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Unpack

from tokenswift.chat.prompts import Prompt
from tokenswift.checks import LARGEST, check_callback, keep_field, meant, shown
from tokenswift.config.fields import Between, check_fields
from tokenswift.config.sampling import (
    SamplingParams,
    check_texts,
    sampling_over,
)
from tokenswift.config.strategies import AutoOptions, MethodOptions, OnLoop, Strategy, build_options
from tokenswift.engine.arguments import GenerationArguments
from tokenswift.grammar import Grammar
from tokenswift.loader.chat_template import check_template_options
from tokenswift.types import InputError, OnProgress

LOGPROBS = Between(0, 20, "an integer from 0 to 20, or None")  # as OpenAI's interface has it
SEEDS = LARGEST + 1  # seeds of the sampler
SAMPLING = tuple(one.name for one in fields(SamplingParams))
INNER = ("conversation_digest", "new_turn")  # fields of a request that no caller sets
#: strategies that draft less the more texts share a pass; the others draft what they are set to
SHARED_STRATEGIES = ("auto", "autoregressive")


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
    strategy_options: Mapping[str, object] | None = None
    sampling: SamplingParams = SamplingParams()
    ignore_eos: bool = False
    stop: str | Sequence[str | Sequence[int]] = ()  # texts, or token ids
    on_loop: OnLoop = "report"
    run_dir: str | os.PathLike[str] | None = None
    on_progress: OnProgress | None = None
    logprobs: Annotated[int | None, LOGPROBS] = None
    prompt_logprobs: Annotated[int | None, LOGPROBS] = None
    template_options: Mapping[str, object] | None = None
    conversation_digest: str | None = None
    new_turn: bool = False
    options: MethodOptions = field(default=AutoOptions(), init=False, compare=False)

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
        settings = {name: value for name, value in options.items() if name in SAMPLING}
        grammar = Grammar.of_format(options.get("response_format"))
        if sampling is None:
            sampling = sampling_over(default_sampling(prompt), settings)
        elif settings:
            both = f"sampling is given together with {' and '.join(settings)}"
            raise InputError(f"{both}; valid: one of the two", "sampling")
        if grammar is not None:
            if sampling.grammar is not None:
                both = "response_format is given together with a grammar of the sampling"
                raise InputError(f"{both}; valid: one of the two", "response_format")
            sampling = replace(sampling, grammar=grammar)
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
            prompt_logprobs=options.get("prompt_logprobs"),
            template_options=options.get("template_options"),
        )

    def __post_init__(self) -> None:
        check_fields(self)
        keep_field(self, "options", build_options(self.strategy, self.strategy_options))
        if not isinstance(self.sampling, SamplingParams):
            valid = "None, or an object such as SamplingParams(seed=7)"
            raise InputError(f"sampling is {shown(self.sampling)}; valid: {valid}", "sampling")
        if self.sampling.grammar is not None:
            self._check_grammar()
        keep_field(self, "stop", check_texts("stop", self.stop))
        check_template_options(self.template_options)
        check_callback("on_progress", self.on_progress)
        if self.run_dir is not None:
            if not isinstance(self.run_dir, str | os.PathLike):
                raise InputError(
                    f"run_dir is {shown(self.run_dir)}; valid: None, or the path of a folder"
                )
            keep_field(self, "run_dir", Path(self.run_dir))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and self.run_dir is not None:
                raise InputError(f"{name} are not kept in a run_dir; valid: one of the two", name)

    def with_sample(self, number: int) -> Request:
        """The request of another text of the same prompt: its seed is so many after this one's,
        and the largest is followed by 0."""
        seed = (self.sampling.seed + number) % SEEDS
        return replace(self, sampling=replace(self.sampling, seed=seed))

    def _check_grammar(self) -> None:
        """Refuse what cannot be had beside a grammar.

        Raises:
            InputError: naming it.
        """
        if getattr(self.options, "acceptance", "exact") == "published":
            line = "acceptance is published together with a grammar; valid: one of the two"
            raise InputError(line, "acceptance")
        if self.ignore_eos:
            line = "ignore_eos is True together with a grammar; valid: one of the two"
            raise InputError(line, "ignore_eos")
        least = self.sampling.min_tokens
        if least > 0:  # a text that is complete can only end
            raise InputError(
                f"min_tokens is {least} together with a grammar; valid: 0", "min_tokens"
            )


def check_names(options: Iterable[str]) -> None:
    """Check the names of keywords that are passed on.

    Raises:
        InputError: naming one that no generation takes, and the one that was probably meant.
    """
    arguments = [one.name for one in fields(Request) if one.init and one.name not in INNER]
    known = [*arguments, "response_format", *SAMPLING]
    for name in options:
        if name not in known:
            valid = ", ".join(known) + meant(name, known)
            raise InputError(f"{name!r} is not an argument; valid: {valid}", name)
