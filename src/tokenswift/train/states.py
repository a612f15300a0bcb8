"""Hidden states of text that the model writes, which writing computes anyway: what it writes after,
and how a store is filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Ticket
from tokenswift.speculation.eagle.features import Features
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.store import WITHOUT_END, HiddenStore
from tokenswift.train.texts import SHORTEST, blocks, questions
from tokenswift.train.work import BadData
from tokenswift.types import OnProgress, RunError

LEAST = 256  # tokens of text that anything can be learnt from
PLAIN = "autoregressive"
SEEDS = 100_003  # of texts, for each seed of a training
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
    with Scheduler(llm, data.write_batch) as scheduler:
        while finished_tokens < data.tokens:
            for number, request in islice(missing, data.write_batch - len(running)):
                recorder = Recorder()
                ticket = scheduler.submit(request, features=recorder)
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
        sampling: of the text.
        is_answer: whether they are a question, whose answer the model ends.
        is_passage: whether they are a part of the text's length.
    """

    tokens: list[int]
    sampling: SamplingParams
    is_answer: bool = False
    is_passage: bool = False


def _requests(llm: LLM, data: DataOptions, job: Job) -> Iterator[Request]:
    """The texts to write, each with a seed of its own."""
    for number, begin in enumerate(_beginnings(llm, data, job)):
        taken = _passage_length(data) if begin.is_passage else 0
        yield Request(
            begin.tokens,
            data.sequence_length - taken,
            PLAIN,
            sampling=replace(begin.sampling, seed=job.training.seed * SEEDS + number),
            ignore_eos=not begin.is_answer,
        )


def _passage_length(data: DataOptions) -> int:
    """Tokens of a passage that the model continues."""
    return data.sequence_length // 3


def _beginnings(llm: LLM, data: DataOptions, job: Job) -> Iterable[Beginning]:
    """What the model writes after, and how: passages of a text; or questions to a model that
    answers; or an empty beginning. Passages of runs come in turns with these, until they end."""
    if data.data != "self":
        return _passages(llm, data.data, data, job)
    if llm.has_chat_template:
        others = _chats(llm, job.training.seed)
    else:
        first = list(llm.tokenizer("")["input_ids"])
        if not first:
            first = [min(llm.source.end_tokens(), default=0)]
        others = repeat(Beginning(first, job.sampling))
    if data.from_runs is None:
        return others
    passages = _passages(llm, data.from_runs, data, job)
    return chain(chain.from_iterable(zip(passages, others, strict=False)), others)


def _passages(llm: LLM, source: str, data: DataOptions, job: Job) -> Iterator[Beginning]:
    """Passages of texts, which the model continues."""
    length = _passage_length(data)
    limit = length * max(1, data.tokens // data.sequence_length)
    for passage in blocks(source, llm.tokenizer, limit, length):
        yield Beginning(passage, job.sampling, is_passage=True)


def _chats(llm: LLM, seed: int) -> Iterator[Beginning]:
    """Questions as a chat's tokens, and how they are answered."""
    plain = SamplingParams(**NEUTRAL)
    for question, temperature in questions(seed):
        chat = [{"role": "user", "content": question}]
        yield Beginning(llm.encode(chat), replace(plain, temperature=temperature), is_answer=True)


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
