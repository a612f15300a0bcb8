"""Many requests through one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Literal

from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.sequence import Sequence as TextSequence
from tokenswift.engine.ticket import Event, Ticket
from tokenswift.speculation.resources import Resources
from tokenswift.types import Generation, Step


def run_all(
    scheduler: Scheduler,
    requests: Iterable[Request],
    on_step: Callable[[int, Step], object] | None = None,
) -> Iterator[tuple[int, Generation | Exception]]:
    """Run requests, which are submitted as earlier ones end; yields the number of each, and its
    result or error, in the order in which they end. ``on_step(number, step)`` is called from the
    scheduler's thread."""
    ended: SimpleQueue[tuple[int, Generation | Exception]] = SimpleQueue()
    under_way = 0

    def collect(ticket: Ticket, number: int, event: Event) -> None:
        if not isinstance(event, Step):
            ended.put((number, ticket.result if event is None else event))
        elif on_step is not None:
            on_step(number, event)

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
        ticket.on_event(partial(collect, ticket, number))
    for _ in range(under_way):
        yield ended.get()


def generate_all(
    resources: Resources,
    requests: Sequence[Request],
    at_once: int | Literal["auto"],
    on_result: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """The results of requests that run concurrently, in the order of the requests.

    Args:
        resources: the model, and what drafts for it.
        requests: the requests; without a ``run_dir``.
        at_once: see `Scheduler`.
        on_result: called with the number of each request and its result, as they end.
    Raises:
        InputError: a request that does not fit the memory even alone; before any runs.
        Exception: the error of the first request that fails; the others end.
    """
    if not requests:
        return []
    longest = max(requests, key=lambda request: len(request.prompt))
    TextSequence(resources, longest)  # if it fits, the others do
    results: dict[int, Generation] = {}
    with Scheduler(resources, at_once) as scheduler:
        for number, result in run_all(scheduler, requests):
            if isinstance(result, Exception):
                raise result
            results[number] = result
            if on_result is not None:
                on_result(number, result)
    return [results[number] for number in range(len(requests))]
