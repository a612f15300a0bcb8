"""Several requests of one model, concurrently: a few submitted ahead, results as they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from tokenswift.config import SamplingParams
from tokenswift.engine.request import Request, check_callback, check_prompt
from tokenswift.engine.run import Run
from tokenswift.engine.scheduler import Scheduler, check_at_once
from tokenswift.engine.ticket import Event, Ticket
from tokenswift.loader.prompts import Prompt, is_chat, several_ids
from tokenswift.memory import default_length
from tokenswift.types import Generation, InputError, Step


def generate_all(
    llm: Any,
    prompts: Sequence[Prompt],
    how: tuple[int | None, str, Any, SamplingParams | None, Any],
    at_once: int | Literal["auto"],
    on_result: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """The generations of prompts, in their order (see ``LLM.generate_many``).

    Args:
        how: what `Request.of` takes besides a prompt and its usual sampling.
    Raises:
        InputError: a prompt or another argument is wrong; nothing was run.
        Exception: what the first to fail failed by; the others end.
    """
    if "run_dir" in how[-1]:
        raise InputError("run_dir is not an argument of generate_many; valid: generate, one run a folder")
    check_callback("on_result", on_result)
    check_at_once(at_once)
    for i, prompt in enumerate(prompts if isinstance(prompts, list | tuple) else ()):
        check_prompt(prompt, f"prompts[{i}]")
    options = how[-1].get("template_options")
    ids = several_ids(prompts, llm.source.codec, llm.target.vocab_size, options)
    made = [Request.of(prompt, llm.default_sampling, *how) for prompt in prompts]
    requests = []
    for request, own in zip(made, ids, strict=True):
        new = request.max_new_tokens
        if new is None:
            new = default_length(llm.target, is_chat(request.prompt), len(own))
        requests.append(replace(request, prompt=own, max_new_tokens=new))
    if requests:
        Run(llm, max(requests, key=lambda request: len(request.prompt)))  # it fits, so the others do
    results: dict[int, Generation] = {}

    def take(number: int, result: Generation) -> None:
        results[number] = result
        if on_result is not None:
            on_result(number, result)

    if llm.target.ranks > 1:  # which texts run concurrently is a matter of time
        for i, request in enumerate(requests):
            take(i, llm.start(request).finish())
    else:
        with Scheduler(llm, at_once) as scheduler:
            for i, result in run_all(scheduler, requests):
                if isinstance(result, Exception):
                    raise result
                take(i, result)
    return [results[i] for i in range(len(requests))]


def run_all(
    scheduler: Scheduler, requests: Iterable[Request], on_step: Callable[[int, Step], object] | None = None
) -> Iterator[tuple[int, Generation | Exception]]:
    """Run requests, a few of them submitted ahead; yields each one's number and its result, or what made it
    fail, in the order in which they end. ``on_step`` is called with number and step, from the scheduler's
    thread."""
    ended: SimpleQueue[tuple[int, Generation | Exception]] = SimpleQueue()
    under_way = 0
    for number, request in enumerate(requests):
        if under_way >= 2 * scheduler.at_once:
            yield ended.get()
            under_way -= 1
        try:
            ticket = scheduler.submit(request)
        except Exception as error:
            yield number, error
            continue
        under_way += 1
        ticket.on_event(partial(_collect, ticket, number, ended, on_step))
    for _ in range(under_way):
        yield ended.get()


def _collect(
    ticket: Ticket,
    number: int,
    ended: SimpleQueue[tuple[int, Generation | Exception]],
    on_step: Callable[[int, Step], object] | None,
    event: Event,
) -> None:
    if not isinstance(event, Step):
        ended.put((number, ticket.result if event is None else event))
    elif on_step is not None:
        on_step(number, event)
