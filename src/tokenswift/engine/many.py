"""Many requests through one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue

from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Event, Ticket
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
