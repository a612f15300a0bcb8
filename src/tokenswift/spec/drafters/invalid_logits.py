"""What is done with drafts that no token can be chosen from: nothing is drafted there, and the run goes on.

Heads and draft models may overflow, or hold NaN, where the target does not. A refused row of theirs is a row
without candidates; it is said once, and a source that goes on like that is left out of the rest of the run.
"""

from __future__ import annotations

import logging

from tokenswift.sampling.choice import RefusedRow, Sampler
from tokenswift.sampling.masks import NoMask
from tokenswift.sampling.ranking import LogitRows, Ranked

MOST = 3  # calls with a refused row, and the source is left out

logger = logging.getLogger("tokenswift")


class Source:
    """One source of drafts in one run.

    Args:
        name: what it is, in words that begin a line.

    Attributes:
        refused: calls so far in which a row was refused.
    """

    def __init__(self, name: str) -> None:
        self.name, self.refused = name, 0

    @property
    def dropped(self) -> bool:
        """Whether it is left out for the rest of the run."""
        return self.refused >= MOST

    def candidates(self, sampler: Sampler, rows: LogitRows) -> list[Ranked]:
        """`Sampler.candidates`, but a row that is refused has none."""
        try:
            return sampler.candidates(rows)
        except RefusedRow as error:
            self.note(error)
        except NoMask:
            pass
        found: list[Ranked] = []
        for row in range(len(rows.paths)):
            try:
                found += sampler.candidates(rows.one(row))
            except (RefusedRow, NoMask):
                found.append(Ranked([], [], []))
        return found

    def note(self, error: RefusedRow) -> None:
        """Take in that a row was refused; the first one is said on the logger ``tokenswift``."""
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "%s: logits for position %d hold %s; no token is drafted from them (the text stays the "
                "same), and after %d such passes this source is left out of the run",
                self.name,
                *error.args,
                MOST,
            )


def heads_source(source: str) -> Source:
    """The draft heads; ``source`` says where they come from, "" where nobody knows."""
    return Source(f"the draft heads ({source})" if source else "the draft heads")


def pass_source() -> Source:
    """Passes of the target over a partial cache."""
    return Source("passes over the partial cache")


def eagle_source() -> Source:
    """An EAGLE-3 drafter."""
    return Source("the EAGLE-3 drafter")


def model_source() -> Source:
    """A draft model."""
    return Source("the draft model")
