"""Log-probabilities of a prompt's own tokens, taken while the prompt is run."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.models.base import BaseTarget
from tokenswift.sampling.sampler import logprobs_of
from tokenswift.types import Logprob

ROWS = 32  # rows of logits at once: V float32 each


class PromptLogprobs:
    """Takes the rows of a prompt as they are run, in order, from the first one on.

    They are the model's own: neither penalties, nor temperature and filters change them, nor a
    grammar.

    Args:
        model: the target.
        prompt: its token ids.
        top: how many of the likeliest tokens are told at each place.

    Attributes:
        records: of each token so far, None for the first one, which nothing predicts.
    """

    def __init__(self, model: BaseTarget, prompt: list[int], top: int) -> None:
        self._model = model
        self._prompt = prompt
        self._top = top
        self.records: list[Logprob | None] = [None]

    @torch.inference_mode()
    def take(self, position: int, hidden: Float[Tensor, "n D"]) -> None:
        """Take some rows.

        Args:
            position: of the first one, which predicts the token after it.
            hidden: their hidden states before the final norm.
        """
        for start in range(0, len(hidden), ROWS):
            first = position + start + 1
            tokens = self._prompt[first : first + min(ROWS, len(hidden) - start)]
            if tokens:
                logits = self._model.logits(hidden[start : start + len(tokens)])
                self.records += logprobs_of(logits, tokens, self._top)
