"""An audit: tokens of every strategy against plain decoding's, logits, and the cost of int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenswift.audit.logits import ONE_ROW, forced_passes, int8_quality, logit_error
from tokenswift.audit.report import BASELINE, Comparison, Report
from tokenswift.checks import LARGEST
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import names_of
from tokenswift.engine.llm import LLM
from tokenswift.speculation.methods import STRATEGIES
from tokenswift.types import InputError, Step

Options = dict[str, object]  # of a strategy

#: What is audited where no options are given: partial caches that are smaller than the text.
SMALL: dict[str, Options] = {
    "tokenswift": {"budget": 64, "draft": "partial"},
    "triforce": {"budget": 64, "draft_budget": 64},
    "magicdec": {"budget": 64},
}
BEFORE = 60  # characters of text shown before a difference


@dataclass(frozen=True, slots=True)
class Text:
    """A text to compare: a prompt, and how it goes on.

    Attributes:
        number: the prompt's, from 1.
        ids: the prompt's token ids.
        sampling: the name of the parameters.
        params: the sampling parameters, with the text's own seed.
    """

    number: int
    ids: list[int]
    sampling: str
    params: SamplingParams


def variants(strategy: str, options: Mapping[str, object]) -> dict[str, Options]:
    """Options by strategy, of one or "all". Without options partial caches are smaller than the
    text."""
    names = [name for name in STRATEGIES if name != BASELINE] if strategy == "all" else [strategy]
    if not options:
        return {name: SMALL.get(name, {}) for name in names}
    return {
        name: {option: value for option, value in options.items() if option in names_of(name)}
        for name in names
    }


def difference(
    llm: LLM, ids: list[int], plain: list[int], others: list[int], params: SamplingParams
) -> tuple[int, str | None]:
    """Compare two texts after a prompt.

    Args:
        ids: the prompt.
        plain: plain decoding's tokens.
        others: as many of another strategy.
        params: how both were chosen.
    Returns:
        How many tokens are plain decoding's, and what is next where they are not all. A score is
        plain decoding's, processed and with the noise, minus infinity where a filter took the
        token.
    """
    pairs = enumerate(zip(plain, others, strict=True))
    place = next((i for i, (token, other) in pairs if token != other), None)
    if place is None:
        return len(plain), None
    text = [*ids, *plain[:place]]
    _, logits = next(forced_passes(llm, text, [0], ONE_ROW))
    scores = llm.target.sampler(params).perturbed(logits[None], text, [[]])[0]

    def shown(tokens: list[int]) -> str:
        if llm.tokenizer is None:
            return " ".join(map(str, tokens))
        return llm.tokenizer.decode(tokens)

    def scored(token: int) -> str:
        return f"{shown([token])!r} ({token}), score {float(scores[token]):.6g}"

    line = (
        f"new token {place}: {scored(others[place])} instead of {scored(plain[place])}, "
        f"after …{shown(text)[-BEFORE:]!r}"
    )
    return place, line


def audit(
    llm: LLM,
    variants: Mapping[str, Mapping[str, object]],
    prompts: Sequence[str | list[int]],
    samplings: Mapping[str, SamplingParams],
    tokens: int = 64,
    seeds: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Audit a model.

    Args:
        variants: options by strategy; of several, one that cannot run here is skipped.
        prompts: text or token ids.
        samplings: name → parameters.
        tokens: new tokens per text.
        seeds: texts per prompt and sampling (one for greedy decoding), from the sampling's seed on.
        say: called with a line of progress now and then.
    Raises:
        InputError: a prompt, a number of new tokens or a strategy that the model cannot run.
    """
    report = Report(llm.name, llm.dtype, llm.device)
    fitting = _fitting(llm, prompts, tokens, say)
    say("int8 beside float32")
    report.quality = int8_quality(llm, fitting)
    for text in _texts(fitting, samplings, seeds):
        place = f"prompt {text.number} of {len(fitting)}, {text.sampling}, seed {text.params.seed}"
        say(f"{place}: plain decoding")
        generation = llm.generate(text.ids, tokens, BASELINE, sampling=text.params, ignore_eos=True)
        plain = generation.token_ids
        if len(report.errors) < text.number:
            say(f"{place}: logits")
            report.errors.append(logit_error(llm, text.ids, plain))
        for strategy, options in variants.items():
            if strategy in report.skipped:
                continue
            say(f"{place}: {strategy}")
            try:
                report.comparisons.append(_compared(llm, text, plain, strategy, options))
            except InputError as error:
                if len(variants) == 1:
                    raise
                report.skipped[strategy] = str(error)
    report.leave_unused()
    return report


def _texts(
    prompts: Sequence[list[int]], samplings: Mapping[str, SamplingParams], seeds: int
) -> Iterator[Text]:
    """The texts to compare: each prompt by each sampling with each seed."""
    for number, ids in enumerate(prompts, 1):
        for name, params in samplings.items():
            for offset in range(1 if params.greedy else seeds):
                yield Text(number, ids, name, replace(params, seed=params.seed + offset))


def _compared(
    llm: LLM, text: Text, plain: list[int], strategy: str, options: Mapping[str, object]
) -> Comparison:
    """Write a text by a strategy, and compare it with plain decoding's tokens.

    Raises:
        InputError: the model cannot run the strategy.
    """
    steps: list[Step] = []
    generation = llm.generate(
        text.ids,
        len(plain),
        strategy,
        options,
        text.params,
        ignore_eos=True,
        on_step=steps.append,
    )
    equal, line = difference(llm, text.ids, plain, generation.token_ids, text.params)
    return Comparison(
        strategy=strategy,
        prompt=text.number,
        sampling=text.sampling,
        seed=text.params.seed,
        tokens=equal,
        difference=line,
        drafted=sum(step.drafted for step in steps),
    )


def _fitting(
    llm: LLM, prompts: Sequence[str | list[int]], tokens: int, say: Callable[[str], None]
) -> list[list[int]]:
    """The prompts as token ids, each cut to what leaves room for the new tokens in the model's
    positions; says whether some were."""
    limit = llm.target.rotary.limit or LARGEST
    if limit <= tokens:
        raise InputError(
            f"max_new_tokens is {tokens}; valid: at most {limit - 1} (the model has {limit} "
            "positions)",
            "max_new_tokens",
        )
    encoded = [llm.encode(prompt) for prompt in prompts]
    room = limit - tokens
    if max(map(len, encoded)) > room:
        say(f"prompts are cut to their first {room} tokens (the model has {limit} positions)")
    return [ids[:room] for ids in encoded]
