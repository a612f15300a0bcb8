"""The choice rule of a request."""

from __future__ import annotations

from collections.abc import Collection

from tokenswift.engine.request import Request
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.text_rules import rules_of
from tokenswift.speculation.resources import Resources


def stop_ids(request: Request) -> tuple[tuple[int, ...], ...]:
    """The token ids that end a request's text, one tuple for each way."""
    return tuple(tuple(stop) for stop in request.stop if not isinstance(stop, str))


def sampler_of(
    resources: Resources, request: Request, prompt_tokens: int, eos: Collection[int]
) -> Sampler:
    """The choice rule of a request's text, with the masks of its grammar.

    Args:
        resources: the model.
        request: the request.
        prompt_tokens: length of the prompt.
        eos: token ids that end the text.
    Raises:
        InputError: settings that the model or its tokenizer does not have.
    """
    target = resources.target
    params = request.sampling
    single_stops = (ids[0] for ids in stop_ids(request) if len(ids) == 1)
    ends = {*eos, *single_stops}
    rules = rules_of(params, resources.source.tokenizer, target.vocab_size, prompt_tokens, ends)
    sampler = target.sampler(params, rules)
    if params.grammar is not None:
        sampler.masks = resources.grammars.masks(params.grammar, prompt_tokens)
    return sampler
