"""Which of the texts that wait has its turn next, and whether the memory holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenswift.engine.prefixes import Prefixes
from tokenswift.engine.run import Run
from tokenswift.engine.ticket import Ticket
from tokenswift.kernels.base import Backend


class Admission:
    """The texts of one scheduler that have their turn, and the memory that they share; its thread's own.

    Args:
        backend: whose memory it is.
        prefixes: texts kept for their beginnings, which give way.
    """

    def __init__(self, backend: Backend, prefixes: Prefixes) -> None:
        self._backend, self._prefixes = backend, prefixes
        self._nbytes: dict[Ticket, int] = {}
        self._turns: dict[str, int] = {}  # of each owner, its last one's number
        self._budget = 0  # bytes that they may take together

    def __len__(self) -> int:
        return len(self._nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the texts that have their turn."""
        return sum([*self._nbytes.values()])

    def next(self, waiting: Iterable[Ticket]) -> Ticket:
        """Of the owner with the fewest texts that have their turn; of several the one whose last turn is
        longest ago; in order."""
        held = Counter(ticket.run.owner for ticket in self._nbytes)
        return min(waiting, key=lambda one: (held[one.run.owner], self._turns.get(one.run.owner, 0)))

    def fits(self, run: Run) -> bool:
        """Whether the memory holds one more text.

        Raises:
            InputError: it does not hold it alone.
        """
        memory = self._backend.memory()
        if memory is None:
            return True
        if not self._nbytes:
            run.check_memory()
            after = self._backend.memory() or memory  # which may have let go of ended texts
            self._budget = after.free + self._prefixes.nbytes
        else:
            room = self._budget - self.nbytes - run.nbytes
            if room < 0:
                return False
            self._prefixes.shrink(room)
        return True

    def add(self, ticket: Ticket) -> None:
        """A text has its turn."""
        self._turns[ticket.run.owner] = max(self._turns.values(), default=0) + 1
        self._nbytes[ticket] = ticket.run.nbytes

    def remove(self, ticket: Ticket) -> None:
        """A text is over, whether it had its turn or not."""
        self._nbytes.pop(ticket, None)
