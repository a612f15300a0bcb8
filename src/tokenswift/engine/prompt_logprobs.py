"""Log-probabilities of a prompt's tokens, taken from the passes that read it.

A pass's states go through the LM head a few rows at a time, and of each row's logits no more is kept than was
asked for: those of a whole prompt would take more memory than the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from tokenswift.models.base import BaseTarget
from tokenswift.sampling.choice import RefusedRow, logprobs_of
from tokenswift.types import Logprob

ROWS = 32  # of logits at a time


class PromptLogprobs:
    """How likely each token of a prompt is after those before it, under the model's own distribution.

    Args:
        model: whose passes read the prompt.
        prompt: token ids.
        top: how many of the likeliest tokens are told with each.

    Attributes:
        found: of the tokens so far; of the first one None.
    """

    def __init__(self, model: BaseTarget, prompt: Sequence[int], top: int) -> None:
        self._model, self._prompt, self._top = model, prompt, top
        self._is_told = False
        self.found: list[Logprob | None] = [None]

    @property
    def is_whole(self) -> bool:
        """Whether the prompt was read."""
        return len(self.found) == len(self._prompt)

    def take(self, at: int, hidden: Float[Tensor, "n D"]) -> None:
        """A pass has read the text from a position on; what is behind the prompt tells nothing here.

        Args:
            at: position of its first row, which the row of the last call came before.
            hidden: before the final norm; each row tells of the token after its own.
        Raises:
            ValueError: rows are missing.
            RefusedRow: the logits hold NaN.
        """
        due = self._prompt[at + 1 : at + 1 + len(hidden)]
        if due and at != len(self.found) - 1:
            raise ValueError(f"a pass at {at} follows rows up to {len(self.found) - 1}")
        for start in range(0, len(due), ROWS):
            tokens = due[start : start + ROWS]
            logits = self._model.logits(hidden[start : start + len(tokens)])
            for each in logprobs_of(logits, tokens, self._top):
                if math.isnan(each.logprob):
                    raise RefusedRow(len(self.found), "NaN")
                self.found.append(each)

    def once(self) -> tuple[Logprob | None, ...]:
        """All of them; nothing at any further call."""
        told, self._is_told = self._is_told, True
        return () if told else (*self.found,)
