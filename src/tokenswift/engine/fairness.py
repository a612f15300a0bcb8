"""Who is next among the requests of a scheduler, so that none takes from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenswift.engine.request import SHARED_STRATEGIES
from tokenswift.engine.ticket import Ticket

NEW_WEIGHT = 1 / 8  # weight of a new time in a running mean


class Owners:
    """The clients whose requests wait, which take turns."""

    def __init__(self) -> None:
        self._last_turns: dict[str, int] = {}  # by owner: number of the last admission

    def next_of(self, waiting: Sequence[Ticket], admitted: Sequence[Ticket]) -> Ticket:
        """The first waiting ticket of the owner with the fewest admitted ones, then of the one
        whose last admission is longest ago."""
        admitted_by_owner = Counter(ticket.sequence.owner for ticket in admitted)

        def rank(ticket: Ticket) -> tuple[int, int]:
            owner = ticket.sequence.owner
            return admitted_by_owner[owner], self._last_turns.get(owner, 0)

        return min(waiting, key=rank)

    def record_admission(self, ticket: Ticket) -> None:
        """Note that an owner has had a turn."""
        self._last_turns[ticket.sequence.owner] = max(self._last_turns.values(), default=0) + 1


class SharedTime:
    """The time that sequences which draft what they are set to, however many share a pass, have
    taken from the others. They wait while it is more than the others have had since."""

    def __init__(self) -> None:
        self._step_seconds = 0.0  # running mean of a step without fixed strategies
        self._owed_seconds = 0.0  # that those with fixed strategies have taken from the others
        self._has_fixed = False  # whether one of them is in the current step
        self._has_others = False

    def turn(self, running: list[Ticket]) -> list[Ticket]:
        """The running sequences that take the next step: all, or those that draft less the more
        share a pass."""
        others = [ticket for ticket in running if not _is_fixed(ticket)]
        if len(others) in (0, len(running)):
            self._owed_seconds = 0.0
        return others if self._owed_seconds > 0 else running

    def begin_step(self, tickets: Sequence[Ticket]) -> None:
        """Note whose step it is; a sequence that ends in it is gone afterwards."""
        self._has_fixed = any(_is_fixed(ticket) for ticket in tickets)
        self._has_others = not all(_is_fixed(ticket) for ticket in tickets)

    def end_step(self, seconds: float) -> None:
        """Learn from the time of the step."""
        if self._has_fixed and self._has_others:
            self._owed_seconds += max(0.0, seconds - self._step_seconds)
        elif self._has_others:
            self._owed_seconds = max(0.0, self._owed_seconds - seconds)
            mean = self._step_seconds or seconds
            self._step_seconds = mean + NEW_WEIGHT * (seconds - mean)


def _is_fixed(ticket: Ticket) -> bool:
    """Whether a sequence drafts what its strategy is set to, however many share the pass."""
    return ticket.sequence.request.strategy not in SHARED_STRATEGIES
