"""Hidden states of text that the model writes, which writing computes anyway: what it writes after,
and how a store is filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.sampling import CONTINUED, NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.prefix_cache import PrefixCache
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Ticket
from tokenswift.speculation.eagle.features import Features
from tokenswift.tokenizer import Tokenizer
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.store import WITHOUT_END, HiddenStore
from tokenswift.train.texts import SHORTEST, blocks, openings, questions
from tokenswift.train.work import BadData
from tokenswift.types import InputError, OnProgress, RunError

LEAST = 256  # tokens of text that anything can be learnt from
PLAIN = "autoregressive"
SEEDS = 100_003  # of texts, for each seed of a training
PASSAGE_SHARE = 3  # what a text of prose begins with is a third of it at most
WAIT_SECONDS = 0.1  # between looks at the texts that are written


class Recorder(Features):
    """Features of a text, all of them, in bfloat16."""

    def __init__(self) -> None:
        super().__init__(1 << 40)

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `Features.take`."""
        super().take(at, features.to("cpu", torch.bfloat16))


class RunningText(NamedTuple):
    """A text that is being written."""

    number: int
    request: Request
    ticket: Ticket
    recorder: Recorder

    def add_to(self, store: HiddenStore) -> None:
        """Add the finished text to a store: its tokens that have states, all but the last one."""
        start, states = recorded_states(self.recorder)
        tokens = [*self.request.prompt, *self.ticket.result.token_ids]
        store.append(self.number, tokens[start : start + len(states)], states)


def collect(
    llm: LLM,
    data: DataOptions,
    job: Job,
    layers: Sequence[int],
    store: HiddenStore,
    on_progress: OnProgress,
) -> None:
    """Fill a store with what the model writes and the states that enter these layers.

    Texts that the store has are not written again. It ends when the texts so far, in order, hold
    the tokens that are wanted. A killed run repeats the texts that were under way, with the same
    tokens.

    Raises:
        InputError: too little text.
        OSError: the disk takes no more.
    """
    llm.target.set_feature_layers(tuple(layers))
    stored = set(store.texts)
    requests = enumerate(_requests(llm, data, job))
    missing = ((number, request) for number, request in requests if number not in stored)
    running: list[RunningText] = []
    finished_tokens = 0  # of the texts before the first one that is being written
    prefixes = PrefixCache(0)  # texts that have ended share nothing that is worth their memory
    with Scheduler(llm, data.write_batch) as scheduler:
        while finished_tokens < data.tokens:
            for number, request in islice(missing, data.write_batch - len(running)):
                recorder = Recorder()
                ticket = scheduler.submit(request, features=recorder, prefixes=prefixes)
                running.append(RunningText(number, request, ticket, recorder))
            if not running:
                break
            running[0].ticket.wait(WAIT_SECONDS)
            for text in [text for text in running if text.ticket.is_over]:
                running.remove(text)
                text.add_to(store)
            first = min((text.number for text in running), default=WITHOUT_END)
            finished_tokens = sum(
                len(tokens) for number, tokens in store.texts.items() if number < first
            )
            on_progress("write", min(store.tokens, data.tokens - 1), data.tokens)
    if store.tokens < LEAST:
        raise BadData(
            f"--data {data.data} gives {store.tokens} tokens to learn from, after passages of "
            f"{SHORTEST} tokens and more; at least {LEAST} are needed"
        )
    store.finish(data.tokens)


class Beginning(NamedTuple):
    """What a text begins with, and how it goes on.

    Attributes:
        tokens: ids.
        new: tokens that follow, at most.
        sampling: of the text.
        is_answer: whether they are a question, whose answer the model ends.
        is_passage: whether they are a short passage of a text.
        is_prose: whether the text is long prose.
    """

    tokens: list[int]
    new: int
    sampling: SamplingParams
    is_answer: bool = False
    is_passage: bool = False
    is_prose: bool = False


def _tokenizer(llm: LLM) -> Tokenizer:
    """The model's tokenizer; transformers' own takes a second to import.

    Raises:
        InputError: it has none.
    """
    tokenizer = llm.source.tokenizer
    if tokenizer is None:
        raise InputError("the model came without a tokenizer; valid: a model with one", "model")
    return tokenizer


def _requests(llm: LLM, data: DataOptions, job: Job) -> Iterator[Request]:
    """The texts to write, each with a seed of its own."""
    for number, begin in enumerate(_beginnings(llm, data, job)):
        yield Request(
            begin.tokens,
            begin.new,
            PLAIN,
            sampling=replace(begin.sampling, seed=job.training.seed * SEEDS + number),
            ignore_eos=not begin.is_answer,
            on_loop="stop" if begin.is_prose else "report",
        )


def _beginnings(llm: LLM, data: DataOptions, job: Job) -> Iterator[Beginning]:
    """What the model writes after, and how: passages of a text; or questions to a model that
    answers, or an empty beginning, and prose as far as its share goes. Passages of runs come in
    turns with these, until they end."""
    if data.data != "self":
        return _passages(llm, data.data, data, job)
    if llm.has_chat_template:
        others = _chats(llm, data, job.training.seed)
    else:
        first = list(_tokenizer(llm)("")["input_ids"])
        if not first:
            first = [min(llm.source.end_tokens(), default=0)]
        others = repeat(Beginning(first, data.sequence_length, job.sampling))
    prose = _prose(llm, data, job.training.seed)
    mixed = _mixed(prose, others, data)
    if data.from_runs is None:
        return mixed
    passages = _passages(llm, data.from_runs, data, job)
    return chain(chain.from_iterable(zip(passages, mixed, strict=False)), mixed)


def _mixed(
    prose: Iterator[Beginning], others: Iterator[Beginning], data: DataOptions
) -> Iterator[Beginning]:
    """Prose and others, so that prose has its share of the tokens; answers count as half of what
    they may have."""
    prose_tokens = 0
    tokens = 0
    while True:
        if data.prose and prose_tokens <= data.prose * tokens:
            prose_tokens += data.long_length
            tokens += data.long_length
            yield next(prose)
        else:
            tokens += data.sequence_length // 2
            yield next(others)


def _prose(llm: LLM, data: DataOptions, seed: int) -> Iterator[Beginning]:
    """Beginnings of long prose, continued as ``generate --continue`` does: passages of the texts of
    runs while there are any, then openings of ours."""
    length = min(data.long_length, llm.target.rotary.limit or data.long_length)
    begun = length // PASSAGE_SHARE
    if data.from_runs is not None:
        limit = int(data.prose * data.tokens) // PASSAGE_SHARE
        for passage in blocks(data.from_runs, _tokenizer(llm), limit, begun):
            yield _continued(passage, length)
    for opening in openings(seed):
        yield _continued(llm.encode(opening)[:begun], length)


def _continued(tokens: list[int], length: int) -> Beginning:
    """A text of prose of so many tokens, in which the model does not end."""
    new = length - len(tokens)
    sampling = replace(CONTINUED, min_tokens=new)
    return Beginning(tokens, new, sampling, is_prose=True)


def _passages(llm: LLM, source: str, data: DataOptions, job: Job) -> Iterator[Beginning]:
    """Passages of texts, which the model continues."""
    length = data.passage_length
    limit = length * max(1, data.tokens // data.sequence_length)
    new = data.sequence_length - length
    for passage in blocks(source, _tokenizer(llm), limit, length):
        yield Beginning(passage, new, job.sampling, is_passage=True)


def _chats(llm: LLM, data: DataOptions, seed: int) -> Iterator[Beginning]:
    """Questions as a chat's tokens, and how they are answered."""
    plain = SamplingParams(**NEUTRAL)
    for question, temperature in questions(seed):
        tokens = llm.encode([{"role": "user", "content": question}])
        sampling = replace(plain, temperature=temperature)
        yield Beginning(tokens, data.sequence_length, sampling, is_answer=True)


def recorded_states(recorder: Recorder) -> tuple[int, Float[Tensor, "n W"]]:
    """The position of the first token that has states, and each one's states side by side.

    Raises:
        RunError: the model's passes gave none.
    """
    features = recorder.drain()
    if features is None:
        raise RunError("the model's passes gave no states")
    start, states = features
    return start, states.transpose(0, 1).flatten(1)
