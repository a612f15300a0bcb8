"""Slow grammar masks, made while other sequences go on."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tokenswift.engine.ticket import Ticket


class MasksAhead:
    """Makes the next masks of sequences whose grammars take long, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future[None]] = {}  # masks being made, by their tickets' ids

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether a sequence can take a step at once; otherwise its mask is being made from now
        on."""
        masks = ticket.sequence.sampler.masks
        number = id(ticket)
        if number in self._masks:
            if not self._masks[number].done():
                return False
            del self._masks[number]  # what went wrong, the step meets again
            return True
        if masks is None or not masks.is_slow:
            return True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tokenswift-masks")
        self._masks[number] = self._thread.submit(masks.prepare, ticket.sequence.tokens)
        return False

    def wait(self, seconds: float) -> None:
        """Wait for a mask, at most so long."""
        wait(self._masks.values(), seconds, FIRST_COMPLETED)

    def forget(self, ticket: Ticket) -> None:
        """Let go of a sequence that has ended."""
        self._masks.pop(id(ticket), None)

    def close(self) -> None:
        """End the thread after the mask that it is making."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
