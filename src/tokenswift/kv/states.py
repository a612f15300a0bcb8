"""States of recurrent layers: what they keep of a text, beside the keys and values of the others.

A recurrent layer keeps no entry a token, but a state of a fixed size: the last inputs of a
convolution, and for the gated delta rule a matrix a head. It cannot be shortened as a list of
entries can, so :class:`States` holds that of the committed tokens, which a pass never changes, and
a *log* of what each of the pass's rows feeds. ``commit`` moves the state along the accepted rows.
*Marks* are copies of earlier states, to which a text can go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

#: rows of a pass over a chain of which no log is kept: of a prompt, which is committed whole
UNLOGGED = 65
#: earlier states that are kept
MOST_MARKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Sizes of a model's recurrent layers: gated short convolutions, or the gated delta rule behind
    a convolution.

    Attributes:
        taps: inputs that a convolution sees, a row's own among them.
        channels: numbers of an input.
        key_heads, value_heads, key_width, value_width: of the delta rule; 0 of short convolutions.
        tiled: whether heads of values take those of keys in turns, rather than in groups.
    """

    taps: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Numbers of a row's keys."""
        return self.key_heads * self.key_width

    @property
    def outputs(self) -> int:
        """Numbers of what leaves a layer, before its last projection."""
        return self.value_heads * self.value_width or self.channels

    @property
    def projected(self) -> int:
        """Numbers of what enters a layer, behind its first projection: a short convolution's B, C
        and x; inputs of the delta rule's convolution, and the gate of its output."""
        return self.channels + self.outputs if self.value_heads else 3 * self.channels

    @property
    def inputs(self) -> int:
        """Numbers of the inputs that a state holds."""
        return (self.taps - 1) * self.channels

    @property
    def state(self) -> int:
        """Numbers of a layer's state: inputs, the oldest first; then a matrix (key_width,
        value_width) for each head."""
        return self.inputs + self.value_heads * self.key_width * self.value_width

    @property
    def logged(self) -> int:
        """Numbers of a row of the log: the convolution's input; of the delta rule keys, values,
        decays and strengths, too."""
        gates = 2 * self.value_heads
        return self.channels + (self.keys + self.outputs + gates if self.value_heads else 0)


#: moves states (layers, state) in place along rows of a log (layers, n, logged), in their order
Replay: TypeAlias = Callable[[Recurrence, Tensor, Tensor, Sequence[int]], None]


class States:
    """States of the recurrent layers of one text.

    Args:
        recurrence: their sizes.
        layers: how many.
        replay: moves them.
        device: of all tensors.

    Attributes:
        now: after the committed tokens, (layers, state) float32; at first 0.
        next: after the last row of the last pass, with ``has_next``.
        has_next: whether a pass is to fill in ``next``: a prompt's, or one of one row. Of drafts
            the log alone is kept, as mostly not all of them are accepted: writing states that
            nobody reads costs as much as a replay.
        length: committed tokens.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        layers: int,
        replay: Replay,
        device: torch.device | str = "cpu",
    ) -> None:
        self.recurrence = recurrence
        self.layers = layers
        self.length = 0
        self._replay = replay
        self._device = device
        self.now: Float[Tensor, "layers state"] = self._empty(recurrence.state).zero_()
        self.next: Float[Tensor, "layers state"] = self._empty(recurrence.state)
        self._log: Tensor = self._empty(0, recurrence.logged)
        self._rows = 0
        self.has_next = False
        self._is_logged = False
        self._marks: dict[int, Tensor] = {}

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(self.layers, *shape, dtype=torch.float32, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        tensors = (self.now, self.next, self._log, *self._marks.values())
        return sum(tensor.nbytes for tensor in tensors)

    def open(
        self, rows: int, parents: Sequence[int] | None
    ) -> Float[Tensor, "layers rows logged"] | None:
        """Prepare a pass over these rows.

        Returns:
            Its log, for as many rows or more; None for a long chain, which is committed whole.
        """
        self._rows = rows
        self.has_next = parents is None or rows == 1
        self._is_logged = parents is not None or rows < UNLOGGED
        if not self._is_logged:
            return None
        if self._log.shape[1] < rows:
            self._log = self._empty(rows, self.recurrence.logged)
        return self._log

    def commit(self, nodes: Sequence[int]) -> None:
        """Move the states along rows of the last pass.

        Raises:
            ValueError: a long chain is not committed whole.
        """
        if self.has_next and len(nodes) == self._rows:
            self.now, self.next = self.next, self.now
        elif nodes:
            if not self._is_logged or max(nodes) >= self._rows:
                raise ValueError(
                    f"{len(nodes)} rows are committed of a pass over {self._rows}; valid: its "
                    f"rows, and all of a prompt's, of {UNLOGGED} or more"
                )
            self._replay(self.recurrence, self.now, self._log, nodes)
        self.length += len(nodes)
        self._rows = 0
        self.has_next = False

    @staticmethod
    def most_bytes(recurrence: Recurrence, layers: int) -> int:
        """Bytes that the states of a text take at most, with marks and a log of usual trees."""
        numbers = (2 + MOST_MARKS) * recurrence.state + (UNLOGGED - 1) * recurrence.logged
        return 4 * layers * numbers

    def mark(self) -> None:
        """Keep a copy of the states as they are; of too many, the one between the nearest two
        others is dropped, never the newest."""
        self._marks[self.length] = self.now.clone()
        if len(self._marks) > MOST_MARKS:
            lengths = [0, *sorted(self._marks)]
            gaps = {
                lengths[index]: lengths[index + 1] - lengths[index - 1]
                for index in range(1, len(lengths) - 1)
            }
            del self._marks[min(gaps, key=gaps.__getitem__)]

    def known(self, length: int) -> int:
        """The greatest number of tokens, up to ``length``, after which the states are known."""
        lengths = (*self._marks, self.length)
        return max((known for known in lengths if known <= length), default=0)

    def rewind(self, length: int) -> None:
        """Go back to the states after ``length`` tokens, which are known."""
        if length != self.length:
            self._take(self, length)
        self._marks = {at: mark for at, mark in self._marks.items() if at <= length}

    def fork(self, length: int | None = None) -> States:
        """An independent copy, after the first ``length`` tokens, for which the states are known;
        None: all."""
        length = self.length if length is None else length
        copy = States(self.recurrence, self.layers, self._replay, self._device)
        copy._take(self, length)
        copy._marks = {at: mark for at, mark in self._marks.items() if at <= length}
        return copy

    def _take(self, source: States, length: int) -> None:
        """Copy the states after ``length`` tokens."""
        if length == source.length:
            self.now.copy_(source.now)
        elif length in source._marks:
            self.now.copy_(source._marks[length])
        elif length == 0:
            self.now.zero_()
        else:
            raise ValueError(
                f"the states after {length} tokens are not known; valid: {source.known(length)}"
            )
        self.length = length
