"""Keywords that `LLM.generate` and its siblings take, with types: for editors and ``help``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import TypedDict, TypeVar, cast, get_type_hints

from tokenswift.config.sampling import Biases, SamplingParams, Texts
from tokenswift.config.strategies import OnLoop, Strategy
from tokenswift.grammar import Grammar
from tokenswift.types import OnProgress

Function = TypeVar("Function", bound=Callable[..., object])


class SamplingArguments(TypedDict, total=False):
    """The fields of `SamplingParams`, which describes them, instead of ``sampling``; the others are
    as by default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eta_cutoff: float
    repetition_penalty: float
    penalty_window: int
    seed: int
    greedy: bool
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_range: int
    dry_breakers: Texts
    xtc_probability: float
    xtc_threshold: float
    logit_bias: Biases
    min_tokens: int
    bad_words: Texts
    grammar: Grammar | None


class SharedArguments(SamplingArguments, total=False):
    """What one text may take, and each of several; `LLM.generate` describes them."""

    ignore_eos: bool
    stop: str | Sequence[str | Sequence[int]]
    on_loop: OnLoop
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: Mapping[str, object] | type | Grammar | None
    template_options: Mapping[str, object] | None
    on_progress: OnProgress | None


class GenerationArguments(SharedArguments, total=False):
    """What one text may take."""

    run_dir: str | os.PathLike[str] | None


class CallArguments(GenerationArguments, total=False):
    """All that follows the prompt in a call, by name."""

    max_new_tokens: int | None
    strategy: Strategy | str
    strategy_options: Mapping[str, object] | None
    sampling: SamplingParams | None


def call_arguments(values: Mapping[str, object]) -> CallArguments:
    """Arguments of a call from outside, such as the fields of a JSON record. Whatever they are:
    `Request.of` checks names and values."""
    return cast(CallArguments, dict(values))


class _Default:
    """Stands for a default in signatures."""

    def __repr__(self) -> str:
        return "…"


def shows(arguments: type) -> Callable[[Function], Function]:
    """Make ``help`` and `inspect.signature` of a function name the keywords that it takes as
    ``**options``.

    Args:
        arguments: the ``TypedDict`` of these keywords.
    """

    def with_signature(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        for name, annotation in get_type_hints(arguments).items():
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=_Default(), annotation=annotation)
            )
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return with_signature
