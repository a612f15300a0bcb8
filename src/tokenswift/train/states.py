"""Hidden states of text that the model writes, which writing computes anyway: what it writes after,
and how a store is filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
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


def _requests(llm: LLM, data: DataOptions, job: Job) -> Iterator[Request]:
    """The texts to write, each with a seed of its own."""
    is_self = data.data == "self"
    answers = is_self and llm.has_chat_template
    new = data.sequence_length
    if not is_self:
        new -= _passage_length(data)
    for number, (prompt, sampling) in enumerate(_prompts(llm, data, job)):
        yield Request(
            prompt,
            new,
            PLAIN,
            sampling=replace(sampling, seed=job.training.seed * SEEDS + number),
            ignore_eos=not answers,
        )


def _passage_length(data: DataOptions) -> int:
    """Tokens of a passage that the model continues."""
    return data.sequence_length // 3


def _prompts(llm: LLM, data: DataOptions, job: Job) -> Iterable[tuple[list[int], SamplingParams]]:
    """What the model writes after, and how: passages of a text; or questions to a model that
    answers; or an empty beginning."""
    if data.data != "self":
        length = _passage_length(data)
        limit = length * max(1, data.tokens // data.sequence_length)
        passages = blocks(data.data, llm.tokenizer, limit, length)
        return ((passage, job.sampling) for passage in passages)
    if llm.has_chat_template:
        return _chats(llm, job.training.seed)
    first = list(llm.tokenizer("")["input_ids"])
    if not first:
        first = [min(llm.source.end_tokens(), default=0)]
    return repeat((first, job.sampling))


def _chats(llm: LLM, seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Questions as a chat's tokens, and how they are answered."""
    plain = SamplingParams(**NEUTRAL)
    for question, temperature in questions(seed):
        chat = [{"role": "user", "content": question}]
        yield llm.encode(chat), replace(plain, temperature=temperature)


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
