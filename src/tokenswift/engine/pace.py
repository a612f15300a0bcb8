"""How much of a prompt is read at a time, so that neither those who write nor those who come wait long."""

from __future__ import annotations

READ = 1.5  # steps' time that a part of a prompt may add to a step
FIRST = 4  # rows of the first part that is read beside texts under way; later ones follow from their times
FEW = 64  # rows of the first part that is read alone
FEWER, MORE = 0.7, 1.1  # what the next part's rows are at least and at most, times the last one's
PART = 0.5  # seconds that a part of a prompt may take for which no text waits
_SLOW = 1 / 8  # weight of a new time in a running mean


class PrefillPace:
    """Rows of the next part of a prompt, by what the parts and steps before took.

    Args:
        most: rows of a part at most.

    Attributes:
        step: running mean of the seconds of a step in which nothing is read; 0: there was none.
    """

    def __init__(self, most: int) -> None:
        self._most, self._beside, self._alone = most, float(FIRST), FEW
        self.step = 0.0

    @property
    def beside(self) -> int:
        """Rows that fit beside a step."""
        return int(self._beside)

    @property
    def alone(self) -> int:
        """Rows of a part for which no text waits."""
        return min(self._alone, self._most)

    def has_read(self, seconds: float) -> None:
        """A part for which no text waited took so long: whoever comes, or cancels, does not wait long."""
        fit = PART / max(seconds, 1e-9)
        self._alone = min(max(FIRST, int(self.alone * min(fit, 2.0))), self._most)

    def has_stepped(self, seconds: float) -> None:
        """A step in which nothing was read took so long."""
        self.step = self.step + _SLOW * (seconds - self.step) if self.step else seconds

    def has_read_beside(self, seconds: float) -> None:
        """A step took so long with a part beside it."""
        if self.step:
            wanted = READ * self.step / max(seconds - self.step, 1e-9)
            rows = self._beside * min(max(wanted, FEWER), MORE)
            self._beside = min(max(1.0, rows), float(self._most))
